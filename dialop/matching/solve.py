"""Best matchings of a table, and the true value of a plan made from partial knowledge.

Values are in the units of the given table. Method: scipy's solver of the linear assignment problem,
a modified Jonker-Volgenant algorithm (Crouse 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from dialop.matching.proposal import Pairs


def best_pairs(values: ArrayLike) -> Pairs:
    """A maximum-weight perfect matching of a square table [reviewer, paper], sorted by reviewer."""
    from scipy.optimize import linear_sum_assignment  # takes a while, and settings need none

    reviewers, papers = linear_sum_assignment(np.asarray(values), maximize=True)
    return tuple((int(r), int(p)) for r, p in zip(reviewers, papers, strict=True))


def best_value(table: Sequence[Sequence[int]]) -> int:
    """The value of the maximum-weight perfect matching."""
    return sum(table[r][p] for r, p in best_pairs(table))


def solo_value(
    table: Sequence[Sequence[int]], mask: Sequence[Sequence[int]], *, unknown: int
) -> int:
    """The true value of the plan that looks best when all cells outside `mask` have the value
    `unknown`."""
    known = np.where(np.asarray(mask, dtype=bool), np.asarray(table), unknown)
    return sum(table[r][p] for r, p in best_pairs(known))
