"""How sure a mean is. Speaks of arrays of numbers, one a game; knows no games, models or torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_DRAWS_AT_ONCE = 4_000_000  # 32 MB of indices


def bootstrap_interval(
    values: Sequence[float] | NDArray[np.float64],
    *,
    seed: int,
    num_resamples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float, float]:
    """The mean of `values` and its bootstrap percentile interval: (mean, low, high).

    Whole resamples of the games are drawn with replacement and the interval spans the middle
    `level` of their means (Efron and Tibshirani 1993, An Introduction to the Bootstrap, §13.3).
    Values must be independent: give one value a game, or one mean an instance if its games were
    played several times. Raises ValueError for no values, a NaN, or a level outside (0, 1).
    """
    sample_N = np.asarray(values, dtype=np.float64)
    if sample_N.ndim != 1 or sample_N.size == 0:
        raise ValueError(f"bootstrap needs a row of at least 1 value, got shape {sample_N.shape}")
    if not np.isfinite(sample_N).all():
        raise ValueError("bootstrap needs finite values, got NaN or infinity among them")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    rng = np.random.default_rng(seed)
    chunk = max(1, _DRAWS_AT_ONCE // sample_N.size)
    means: list[NDArray[np.float64]] = []
    for start in range(0, num_resamples, chunk):
        rows = min(chunk, num_resamples - start)
        picks_RN = rng.integers(0, sample_N.size, (rows, sample_N.size))
        means.append(sample_N[picks_RN].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(sample_N.mean()), float(low), float(high)


def show_interval(interval: tuple[float, float, float]) -> str:
    """`0.912 [0.903, 0.921]`"""
    mean, low, high = interval
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
