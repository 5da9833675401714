"""Baselines and divisors of advantages. Pure functions over floats.

An advantage is (value - baseline) / divisor. A sample has one value per trained token; it enters as
the mean of its values and their variance within the sample. If one reward covers the full episode,
the mean is that reward and the variance is 0.

Shapes: G samples of a group, B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_mean(means_G: Sequence[float]) -> list[float]:
    """The group's mean as each sample's baseline (GRPO, arXiv 2402.03300, section 4.1.2)."""
    mean = sum(means_G) / len(means_G)
    return [mean] * len(means_G)


def leave_one_out(means_G: Sequence[float]) -> list[float]:
    """The mean of the other samples as each one's baseline (RLOO, arXiv 2402.14740).

    It does not depend on the sample itself, so the gradient stays unbiased. The only sample of a
    group is its own baseline.
    """
    if len(means_G) == 1:
        return list(means_G)
    total = sum(means_G)
    return [(total - mean) / (len(means_G) - 1) for mean in means_G]


def reward_std(means_G: Sequence[float], withins_G: Sequence[float]) -> float:
    """The population standard deviation; every sample has equal weight, whatever its length."""
    mean = sum(means_G) / len(means_G)
    squares = [(m - mean) ** 2 + w for m, w in zip(means_G, withins_G, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def batch_moments(
    means_B: Sequence[float], withins_B: Sequence[float], lengths_B: Sequence[int]
) -> tuple[float, float]:
    """Mean and standard deviation of the values of all tokens of a batch, with equal weight for
    every token (REINFORCE++, arXiv 2501.03262, global advantage normalization)."""
    num = sum(lengths_B)
    mean = sum(n * m for n, m in zip(lengths_B, means_B, strict=True)) / num
    squares = [
        n * ((m - mean) ** 2 + w) for n, m, w in zip(lengths_B, means_B, withins_B, strict=True)
    ]
    return mean, math.sqrt(sum(squares) / num)


def moved_average(old: float | None, mean: float, *, decay: float) -> float:
    """decay * old + (1 - decay) * mean, or the mean itself if there is no old one (the baseline of
    role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119)."""
    return mean if old is None else decay * old + (1.0 - decay) * mean
