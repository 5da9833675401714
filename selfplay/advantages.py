"""From a group's rewards to its advantages. Pure functions over floats; G episodes of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence


def grpo_advantages(rewards_G: Sequence[float], *, divide_by_std: bool, eps: float) -> list[float]:
    """Group-relative advantages (reward - mean) / (std + eps), arXiv 2402.03300 eq. 3.

    The standard deviation is the population's. Without `divide_by_std` only the mean is subtracted
    (Dr. GRPO, arXiv 2503.20783).
    """
    mean = sum(rewards_G) / len(rewards_G)
    centred = [reward - mean for reward in rewards_G]
    if not divide_by_std:
        return centred
    std = math.sqrt(sum(c * c for c in centred) / len(centred))
    return [c / (std + eps) for c in centred]
