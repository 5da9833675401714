"""Random matching instances, each a pure function of (recipe, seed, index). Values in table units.

Tables are drawn until communication pays: the plan of a seat alone must miss the value of the best
matching by the hardness factor. Source of the distribution: DialOp's released generator, which
keeps about one table in 3,000 at 8x8. For speed, tables are drawn in blocks, and most are rejected
by one seat's plan and a cheap upper bound on the best matching.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dialop.kit import check_options, option, stream_rng
from dialop.matching.board import (
    MAX_MAX_VALUE,
    MAX_VALUE,
    MatchingInstance,
    referenced,
    unknown_value,
)
from dialop.matching.roster import REVIEWERS

_FIRST_BLOCK = 16
_LAST_BLOCK = 512
_MIN_SCALE, _MAX_SCALE = 1.0, 10.0


@dataclass(frozen=True)
class MatchingRecipe:
    """The distribution of instances: `size` x `size` boards, values from 0 to `max_value` - 1.

    Values are floor(`max_value` x u^`skew`) of uniform u, so that with `skew` above 1 few pairs are
    worth much. Each seat sees each cell with probability `p_observed`; with `split_rows` seat 0
    sees half of the rows, drawn at random (of an odd number the larger half), and seat 1 the
    others. If `scale`, a seat sees the values multiplied by its own hidden factor in [1, 10]. A
    table is kept if solo x `hardness` < best holds for both seats ("both") or for exactly one
    ("exactly_one"), if the mean value of all plans x `hardness` < best ("random"), or in any case
    ("all"). After `max_tables` rejected tables, the next one is kept unconditionally.
    """

    size: int = option(8, "number of rows and of columns of the board", low=2, high=len(REVIEWERS))
    p_observed: float = option(0.4, "probability that a seat sees a cell", low=0.01, high=1.0)
    split_rows: bool = option(
        False, "seat 0 sees half of the rows and seat 1 the others, instead of p_observed"
    )
    scale: bool = option(True, "multiply each seat's values by a hidden factor from 1 to 10")
    max_value: int = option(MAX_VALUE, "all values are below this", low=2, high=MAX_MAX_VALUE)
    skew: float = option(
        1.0,
        "values are max_value x u^skew of uniform u: above 1 few pairs are worth much",
        low=1.0,
        high=10.0,
    )
    hardness: float = option(
        1.25, "a plan is weak if its value times this is below the best", low=1.0, high=1000.0
    )
    keep: Literal["both", "exactly_one", "random", "all"] = option(
        "both",
        "keep boards where both seats' own plans are weak, exactly one's is, a random plan is on "
        "average, or all",
    )
    max_tables: int = option(
        10_000, "most tables to reject for one instance", low=0, high=1_000_000_000
    )

    def __post_init__(self) -> None:
        check_options(self)


def generate_instance(recipe: MatchingRecipe, *, seed: int, index: int) -> MatchingInstance:
    """Instance `index` of the stream `seed`, the same in every process and for every batch size.

    The first seat alternates with the index, so each seat starts half of any even number of
    consecutive instances.
    """
    rng = stream_rng(seed, index)
    table, masks = _draw_kept(recipe, rng)
    first, second = rng.uniform(_MIN_SCALE, _MAX_SCALE, size=2).tolist() if recipe.scale else (1, 1)
    rows = tuple(tuple(row) for row in table.tolist())
    mask_rows = [tuple(tuple(row) for row in mask.astype(int).tolist()) for mask in masks]
    return referenced(
        MatchingInstance(
            key=f"{seed}/{index}",
            size=recipe.size,
            table=rows,
            masks=(mask_rows[0], mask_rows[1]),
            scales=(float(first), float(second)),
            first_seat=(seed + index) % 2,
            max_value=recipe.max_value,
        )
    )


def _draw_kept(recipe: MatchingRecipe, rng: np.random.Generator) -> tuple[Any, Any]:
    """The first kept table [reviewer, paper] and its masks [seat, reviewer, paper]."""
    num_refused, block = 0, _FIRST_BLOCK
    while True:
        tables, masks = _draw_block(recipe, rng, block)
        cap = recipe.max_tables - num_refused
        kept = _first_kept(recipe, tables, masks, num_tested=min(block, cap))
        if kept is None and cap < block:
            kept = cap
        if kept is not None:
            return tables[kept], masks[kept]
        num_refused += block
        block = min(2 * block, _LAST_BLOCK)


def _draw_block(recipe: MatchingRecipe, rng: np.random.Generator, num: int) -> tuple[Any, Any]:
    """Tables [num, reviewer, paper] and masks [num, seat, reviewer, paper].

    Cells that neither seat sees already hold the unknown value.
    """
    shape = (num, recipe.size, recipe.size)
    dtype = np.uint8 if recipe.max_value <= 256 else np.uint16
    if recipe.skew == 1:
        tables = rng.integers(0, recipe.max_value, size=shape, dtype=dtype)
    else:
        tables = (recipe.max_value * rng.random(shape) ** recipe.skew).astype(dtype)
    if recipe.split_rows:
        order = rng.permuted(np.tile(np.arange(recipe.size) % 2, (num, 1)), axis=1)
        rows = np.stack([order == 0, order == 1], axis=1)
        masks = np.repeat(rows[..., None], recipe.size, axis=-1)
    else:
        masks = rng.random((num, 2, recipe.size, recipe.size), dtype=np.float32) < recipe.p_observed
    np.putmask(tables, ~(masks[:, 0] | masks[:, 1]), unknown_value(recipe.max_value))
    return tables, masks


def _first_kept(recipe: MatchingRecipe, tables: Any, masks: Any, *, num_tested: int) -> int | None:
    """The index of the first kept table among the first `num_tested`."""
    if num_tested == 0:
        return None
    if recipe.keep == "all":
        return 0
    tables, masks = tables[:num_tested].astype(np.int32), masks[:num_tested]
    # No matching exceeds the sum of the row maxima, or the sum of the column maxima.
    bound = np.minimum(tables.max(axis=2).sum(axis=1), tables.max(axis=1).sum(axis=1))
    unknown = unknown_value(recipe.max_value)
    known = np.where(masks, tables[:, None], unknown)
    for index in range(num_tested):
        limit = float(bound[index])
        if recipe.keep == "random":
            weak = float(tables[index].mean()) * recipe.size * recipe.hardness
            if weak < limit and weak < _plan_value(tables[index], tables[index]):
                return index
            continue
        first = _plan_value(tables[index], known[index, 0])
        first_may_fail = first * recipe.hardness < limit
        if recipe.keep == "both" and not first_may_fail:
            continue
        second = _plan_value(tables[index], known[index, 1])
        second_may_fail = second * recipe.hardness < limit
        if not (second_may_fail or (first_may_fail and recipe.keep == "exactly_one")):
            continue
        best = _plan_value(tables[index], tables[index])
        fails = first * recipe.hardness < best, second * recipe.hardness < best
        if fails[0] + fails[1] == (2 if recipe.keep == "both" else 1):
            return index
    return None


def _plan_value(table: Any, known: Any) -> int:
    """The value in `table` of the plan that is best in `known`."""
    from scipy.optimize import linear_sum_assignment

    return int(table[linear_sum_assignment(known, maximize=True)].sum())
