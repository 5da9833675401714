"""What a scripted player makes of its own cells and of what it was told: one estimated table in its
own units.

Its partner's numbers carry another hidden scale, so they are first brought to its own by an
estimated ratio. Knows only a view: never the true table, the scales or the partner's cells.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dialop.matching.board import MatchingView
from dialop.matching.proposal import Pairs
from dialop.matching.solve import best_pairs
from dialop.matching.statements import stated_cells

Cells = dict[tuple[int, int], int]

# trunc() takes half a unit off every shown value on average.
_TRUNCATED = 0.5


def own_cells(view: MatchingView) -> Cells:
    """The cells a seat sees, {(reviewer, paper): displayed value}, in table order."""
    return {
        (r, p): value
        for r, row in enumerate(view.displayed)
        for p, value in enumerate(row)
        if value is not None
    }


def told_cells(view: MatchingView, *, seat: int) -> Cells:
    """The cells that a seat's messages have stated, in that seat's units; its last word counts."""
    told: Cells = {}
    for action in view.log:
        if action.kind == "message" and action.seat == seat:
            for reviewer, paper, value in stated_cells(action.text, view):
                told[reviewer, paper] = value
    return told


def estimate_top(cells: Mapping[tuple[int, int], int], *, num_cells: int) -> float:
    """The upper end of the range that `num_cells` uniform values came from, given their largest:
    max (n + 1) / n.

    This is the usual unbiased estimate of a uniform maximum, far less noisy than twice the mean. 1
    without any cell.
    """
    if not cells:
        return 1.0
    return (max(cells.values()) + _TRUNCATED) * (num_cells + 1) / num_cells


def estimate_ratio(own: Cells, told: Cells) -> float:
    """How many own units one unit of the partner's is: from cells both see, else from the two
    ranges."""
    shared = [cell for cell in told if cell in own]
    total_told = sum(told[cell] + _TRUNCATED for cell in shared)
    total_own = sum(own[cell] + _TRUNCATED for cell in shared)
    if total_told > 0 and total_own > 0:
        return total_own / total_told
    if not own or not told:
        return 1.0
    # A partner that tells only its best cells has seen about as many as oneself.
    top_told = estimate_top(told, num_cells=max(len(told), len(own)))
    return estimate_top(own, num_cells=len(own)) / top_told if top_told > 0 else 1.0


def value_range(view: MatchingView, told: Cells) -> float:
    """The width of the range of values in own units, estimated where scales are hidden."""
    if view.public_unknown is not None:
        return 2.0 * view.public_unknown
    cells = own_cells(view) or told
    return estimate_top(cells, num_cells=len(cells))


def pooled_table(view: MatchingView, told: Cells) -> NDArray[np.float64]:
    """The estimated table [reviewer, paper] in own units: own cells, else told ones, else the mean
    of the range."""
    own = own_cells(view)
    ratio = 1.0 if view.public_unknown is not None else estimate_ratio(own, told)
    scaled = {cell: value * ratio for cell, value in told.items()}
    table = np.full((view.size, view.size), value_range(view, told) / 2)
    for known in (scaled, own):
        for (reviewer, paper), value in known.items():
            table[reviewer, paper] = value
    return table


def levels(table: NDArray[np.float64], top: float) -> NDArray[np.int_]:
    """The table in tenths of its range [0, top), 0 to 9: at 8x8 the best plan of a table so rounded
    is worth 0.996 of the best."""
    return np.clip(10 * (table / top), 0, 9).astype(int)


def best_plan(table: NDArray[np.float64]) -> Pairs:
    """The matching that looks best in an estimated table, in the papers' order."""
    return tuple(sorted(best_pairs(table), key=lambda pair: pair[1]))


def straying_plan(
    table: NDArray[np.float64], *, stray: float, rng: np.random.Generator
) -> tuple[Pairs, tuple[bool, ...]]:
    """A matching chosen paper by paper, and which of its pairs are strays.

    With the chance `stray` a paper gets one of the free reviewers at random; any other pair belongs
    to the best plan that is still open after the pairs before it.
    """
    size, pairs, strays = len(table), list[tuple[int, int]](), list[bool]()
    free, plan = list(range(size)), dict(pair[::-1] for pair in best_plan(table))
    for paper in range(size):
        strays.append(bool(rng.random() < stray))
        reviewer = int(rng.choice(free)) if strays[-1] else plan[paper]
        pairs.append((reviewer, paper))
        free.remove(reviewer)
        if reviewer != plan[paper]:
            rest = best_pairs(table[np.ix_(free, range(paper + 1, size))])
            plan = {paper + 1 + column: free[row] for row, column in rest}
    return tuple(pairs), tuple(strays)


def worth(table: NDArray[np.float64], pairs: Pairs) -> float:
    """A matching's value in an estimated table."""
    return float(sum(table[reviewer, paper] for reviewer, paper in pairs))
