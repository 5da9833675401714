"""Best matchings of a table: the maximum-weight assignment and what a plan from partial knowledge
is truly worth.

Values in the units of the table given. Source of the method: the Hungarian algorithm as in scipy
(Crouse 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from dialop.matching.proposal import Pairs


def best_pairs(values: ArrayLike) -> Pairs:
    """A maximum-weight perfect matching of a square table [reviewer, paper], sorted by reviewer."""
    reviewers, papers = linear_sum_assignment(np.asarray(values), maximize=True)
    return tuple((int(r), int(p)) for r, p in zip(reviewers, papers, strict=True))


def best_value(table: Sequence[Sequence[int]]) -> int:
    """The value of the maximum-weight perfect matching."""
    return sum(table[r][p] for r, p in best_pairs(table))


def solo_value(
    table: Sequence[Sequence[int]], mask: Sequence[Sequence[int]], *, unknown: int
) -> int:
    """The true value of the plan that is best when every cell outside `mask` is taken for
    `unknown`."""
    known = np.where(np.asarray(mask, dtype=bool), np.asarray(table), unknown)
    return sum(table[r][p] for r, p in best_pairs(known))
