"""Bootstrap confidence intervals of a mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_INDICES = 4_000_000  # drawn at a time, 32 MB


def bootstrap_interval(
    values: Sequence[float] | NDArray[np.float64],
    *,
    seed: int,
    num_resamples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float, float]:
    """The mean of `values` and its bootstrap percentile interval: (mean, low, high).

    Resamples of the same size N are drawn with replacement, and the interval spans the middle
    `level` of their means (Efron and Tibshirani 1993, An Introduction to the Bootstrap, §13.3).
    Values must be independent: pass one value per game, or one mean per instance if an instance was
    played several times. Raises ValueError for no values, NaN or infinity, or a level outside
    (0, 1).

    Shapes: N values, R resamples.
    """
    sample_N = np.asarray(values, dtype=np.float64)
    if sample_N.ndim != 1 or sample_N.size == 0:
        raise ValueError(f"bootstrap needs at least 1 value in 1 dimension, got {sample_N.shape}")
    if not np.isfinite(sample_N).all():
        raise ValueError("bootstrap needs finite values, got NaN or infinity among them")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    rng = np.random.default_rng(seed)
    chunk = max(1, _MAX_INDICES // sample_N.size)
    means: list[NDArray[np.float64]] = []
    for start in range(0, num_resamples, chunk):
        rows = min(chunk, num_resamples - start)
        indices_RN = rng.integers(0, sample_N.size, (rows, sample_N.size))
        means.append(sample_N[indices_RN].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(sample_N.mean()), float(low), float(high)


def show_interval(interval: tuple[float, float, float]) -> str:
    """`0.912 [0.903, 0.921]`"""
    mean, low, high = interval
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
