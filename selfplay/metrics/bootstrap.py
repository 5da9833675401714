"""Bootstrap confidence intervals of a mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_INDICES = 4_000_000  # drawn at a time, 32 MB


def bootstrap_interval(
    values: Sequence[float] | NDArray[np.float64], *, seed: int
) -> tuple[float, float, float]:
    """The mean of `values` and its bootstrap percentile interval: (mean, low, high).

    The interval spans the middle 95 % of the means of resamples (Efron and Tibshirani 1993, An
    Introduction to the Bootstrap, §13.3). Values must be independent: pass one value per game, or
    one mean per instance if an instance was played several times. Raises ValueError for no values,
    NaN or infinity.
    """
    from scipy.stats import bootstrap  # takes half a second, which only evaluations pay

    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"bootstrap needs at least 1 value in 1 dimension, got {sample.shape}")
    if not np.isfinite(sample).all():
        raise ValueError("bootstrap needs finite values, got NaN or infinity among them")
    mean = float(sample.mean())
    if sample.size == 1:
        return mean, mean, mean
    interval = bootstrap(
        (sample,),
        np.mean,
        n_resamples=10_000,
        batch=max(1, _MAX_INDICES // sample.size),
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return mean, float(interval.low), float(interval.high)


def show_interval(interval: tuple[float, float, float]) -> str:
    """`0.912 [0.903, 0.921]`"""
    mean, low, high = interval
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
