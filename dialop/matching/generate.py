"""Random matching instances, each a pure function of (recipe, seed, index). Values in table units.

Tables are drawn until communication pays: a seat that plans alone must miss the value of the best
matching by the hardness factor. Source of the distribution: DialOp's released generator, which
keeps about one table in 3,000 at 8x8. For speed, tables are drawn in blocks, and most are rejected
by one seat's plan and a cheap upper bound on the best matching. Knows no texts and plays no game.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
from scipy.optimize import linear_sum_assignment

from dialop.matching.board import MAX_MAX_VALUE, MAX_VALUE, MatchingInstance, unknown_value
from dialop.matching.roster import REVIEWERS
from dialop.matching.solve import best_value, solo_value

Keep = Literal["both", "exactly_one", "all"]
KEEPS: tuple[Keep, ...] = ("both", "exactly_one", "all")

_FIRST_BLOCK = 16
_LAST_BLOCK = 512
_MIN_SCALE, _MAX_SCALE = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class MatchingRecipe:
    """The distribution of instances: `size` x `size` boards, values from 0 to `max_value` - 1.

    Each seat sees each cell with probability `p_observed`. If `scale`, it sees the values
    multiplied by its own hidden factor in [1, 10]. A table is kept if solo x `hardness` < best
    holds for both seats ("both"), for exactly one ("exactly_one"), or in any case ("all"). After
    `max_tables` rejected tables, the next one is kept unconditionally.
    """

    size: int = 8
    p_observed: float = 0.4
    scale: bool = True
    max_value: int = MAX_VALUE
    hardness: float = 1.25
    keep: Keep = "both"
    max_tables: int = 10_000

    def __post_init__(self) -> None:
        if not 2 <= self.size <= len(REVIEWERS):
            raise ValueError(f"size must be 2 to {len(REVIEWERS)}, got {self.size}")
        if not 0 < self.p_observed <= 1:
            raise ValueError(f"p_observed must lie above 0 and up to 1, got {self.p_observed}")
        if not 2 <= self.max_value <= MAX_MAX_VALUE:
            raise ValueError(f"max_value must be 2 to {MAX_MAX_VALUE}, got {self.max_value}")
        if not 1 <= self.hardness < math.inf:
            raise ValueError(f"hardness must be a number from 1, got {self.hardness}")
        if self.keep not in KEEPS:
            raise ValueError(f"keep must be one of {', '.join(KEEPS)}, got {self.keep!r}")
        if self.max_tables < 0:
            raise ValueError(f"max_tables must be at least 0, got {self.max_tables}")


def generate_instance(recipe: MatchingRecipe, *, seed: int, index: int) -> MatchingInstance:
    """Instance `index` of the stream `seed`, the same in every process and for every batch size.

    The first seat alternates with the index, so each seat starts half of any even number of
    consecutive instances.
    """
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must be at least 0, got {seed} and {index}")
    rng = np.random.default_rng((seed, index))
    table, masks = _draw_kept(recipe, rng)
    scales = (1.0, 1.0)
    if recipe.scale:
        draws = rng.uniform(_MIN_SCALE, _MAX_SCALE, size=2)
        scales = float(draws[0]), float(draws[1])
    rows = tuple(tuple(row) for row in table.tolist())
    mask_rows = [tuple(tuple(row) for row in mask.astype(int).tolist()) for mask in masks]
    unknown = unknown_value(recipe.max_value)
    solo = [float(solo_value(rows, mask, unknown=unknown)) for mask in mask_rows]
    return MatchingInstance(
        key=f"{seed}/{index}",
        size=recipe.size,
        table=rows,
        masks=(mask_rows[0], mask_rows[1]),
        scales=scales,
        first_seat=(seed + index) % 2,
        best=best_value(rows),
        solo=(solo[0], solo[1]),
        max_value=recipe.max_value,
    )


def generate_many(
    recipe: MatchingRecipe, *, seed: int, num: int, start: int = 0, processes: int = 1
) -> list[MatchingInstance]:
    """Instances `start` up to `start + num` of the stream `seed`, in order."""
    if num < 0 or processes < 1:
        raise ValueError(f"num must be at least 0 and processes 1, got {num} and {processes}")
    indices = range(start, start + num)
    if processes == 1:
        return [generate_instance(recipe, seed=seed, index=index) for index in indices]
    chunk = max(1, min(64, num // (4 * processes)))
    jobs = [(recipe, seed, indices[i : i + chunk]) for i in range(0, num, chunk)]
    # Spawn, because forking a process with running threads (torch, an engine) can hang.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [instance for part in pool.map(_generate_job, jobs) for instance in part]


def _generate_job(job: tuple[MatchingRecipe, int, Sequence[int]]) -> list[MatchingInstance]:
    recipe, seed, indices = job
    return [generate_instance(recipe, seed=seed, index=index) for index in indices]


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
    tables = rng.integers(0, recipe.max_value, size=shape, dtype=dtype)
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
    # No matching exceeds the sum of the row maxima, or that of the column maxima.
    bound = np.minimum(tables.max(axis=2).sum(axis=1), tables.max(axis=1).sum(axis=1))
    unknown = unknown_value(recipe.max_value)
    known = np.where(masks, tables[:, None], unknown)
    for index in range(num_tested):
        limit = float(bound[index])
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
    return int(table[linear_sum_assignment(known, maximize=True)].sum())
