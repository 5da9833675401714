"""What the best pair scores on 2x2 boards of matching if nothing is said, exactly.

    python -m bench.silent_bound [--config configs/talk.yaml] [key=value ...]

Three moves (`rollout.max_turns=3`) leave a pair without messages one way to a score: the first seat
proposes and its partner accepts. A rejection leaves one move, a proposal that nobody can accept. So
the score depends on the first plan alone. The first seat knows its own cells and how boards are
drawn; whatever it does, it cannot beat the plan with the highest expected score given these cells.
The mean of that score over all boards is the bound, and the pair whose second seat accepts
everything reaches it. Nothing is sampled: every table and mask is enumerated with its probability.

With more moves a pair can also reject and propose again, so for `configs/tiny.yaml` the figure is
what one proposal can reach, not a bound.

A message has content and an author. The last figure is of pairs that use only the second: the first
seat, by its own cells, either proposes or sends a message that says nothing, after which its
partner, knowing that, proposes by its own cells. Both choices are improved in turn until neither
gains, from 21 starts ("pass below this expected score"); the best is printed, a lower bound of what
such pairs can reach.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialop.matching.board import best_pairs, unknown_value
from dialop.matching.generate import MatchingRecipe
from selfplay.config import load_config
from selfplay.errors import SettingsError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Boards:
    """All boards that a recipe keeps. `scores` [board, plan] are the shares of the best value that
    the two plans are worth, `views` [seat, board] numbers of what a seat sees, `weights` the
    boards' probabilities."""

    scores: Floats
    views: NDArray[np.int64]
    weights: Floats


def boards(recipe: MatchingRecipe) -> Boards:
    """Enumerate the tables and masks of a recipe of 2x2 boards without scales."""
    most = recipe.max_value
    values = np.array(list(itertools.product(range(most), repeat=4))).reshape(-1, 2, 2)
    # A value is floor(most x u^skew), so it is below v if u is below (v / most)^(1 / skew).
    chances = np.diff((np.arange(most + 1) / most) ** (1 / recipe.skew))
    chance = chances[values].prod(axis=(1, 2))
    scores, views, weights = [], [], []
    for masks, p_masks in _masks(recipe):
        tables = np.where(masks.any(axis=0), values, unknown_value(most))
        keep = kept(recipe, tables, masks)
        plans = _plans(tables[keep])
        best = plans.max(axis=1, keepdims=True)
        scores.append(np.where(best > 0, plans / np.maximum(best, 1), 1.0))
        shown = np.where(masks[:, None], tables[keep], most).reshape(2, -1, 4)
        views.append(shown @ (most + 1) ** np.arange(4))
        weights.append(chance[keep] * p_masks)
    weight = np.concatenate(weights)
    return Boards(np.concatenate(scores), np.concatenate(views, axis=1), weight / weight.sum())


def kept(recipe: MatchingRecipe, tables: NDArray[Any], masks: Bools) -> Bools:
    """Which tables [board, 2, 2] the recipe keeps under masks [seat, 2, 2]."""
    plans = _plans(tables)
    best = plans.max(axis=1)
    if recipe.keep == "all":
        return np.ones(len(tables), dtype=np.bool_)
    if recipe.keep == "random":
        return np.asarray(plans.mean(axis=1) * recipe.hardness < best)
    known = np.where(masks[:, None], tables, unknown_value(recipe.max_value))
    diagonal = _planned(recipe.max_value)[tuple(known.reshape(2, -1, 4).transpose(2, 0, 1))]
    num_weak = (np.where(diagonal, *plans.T) * recipe.hardness < best).sum(axis=0)
    return np.asarray(num_weak == (2 if recipe.keep == "both" else 1))


@lru_cache
def _planned(most: int) -> Bools:
    """Whether the plan that the game's solver finds in a table is the diagonal, by the table's four
    values; of two equally good plans it may take either."""
    tables = np.array(list(itertools.product(range(most), repeat=4))).reshape(-1, 2, 2)
    found = [best_pairs(table) == ((0, 0), (1, 1)) for table in tables]
    return np.array(found).reshape((most,) * 4)


def _plans(tables: NDArray[Any]) -> NDArray[Any]:
    """The values [board, plan] of the plan on the diagonal and of the other."""
    on, off = tables[:, (0, 1), (0, 1)], tables[:, (0, 1), (1, 0)]
    return np.stack([on.sum(axis=1), off.sum(axis=1)], axis=1)


def _masks(recipe: MatchingRecipe) -> list[tuple[Bools, float]]:
    """Each pair of masks [seat, 2, 2] and its probability."""
    if recipe.split_rows:
        first = np.array([[True, True], [False, False]])
        return [(np.stack([rows, ~rows]), 0.5) for rows in (first, ~first)]
    p = recipe.p_observed
    pairs = (np.array(seen).reshape(2, 2, 2) for seen in itertools.product((False, True), repeat=8))
    return [(masks, p ** masks.sum() * (1 - p) ** (~masks).sum()) for masks in pairs]


def silent(found: Boards) -> float:
    """The best mean score of a plan that depends on the first seat's cells alone."""
    _, view = np.unique(found.views[0], return_inverse=True)
    return float(_by_view(view, found.scores.T, found.weights).max(axis=0).sum())


def who_proposes(found: Boards) -> float:
    """The best mean score found if a message only says that the partner proposes."""
    first, second = (np.unique(view, return_inverse=True)[1] for view in found.views)
    own = _by_view(first, found.scores.T, found.weights).max(axis=0)
    sure = own / np.bincount(first, found.weights)
    best, every = 0.0, np.arange(len(found.weights))
    for threshold in np.quantile(sure, np.linspace(0, 1, 21)):
        passes, last, now = sure <= threshold, -1.0, 0.0
        while now > last + 1e-9:
            heard = found.weights * passes[first]
            plan = _by_view(second, found.scores.T, heard).argmax(axis=0)[second]
            passed = np.bincount(first, found.weights * found.scores[every, plan])
            last, now = now, float(np.where(passes, passed, own).sum())
            passes, best = passed > own, max(best, now)
    return best


def _by_view(view: NDArray[np.int64], scores: Floats, weights: Floats) -> Floats:
    """The sums [plan, view] of the plans' weighted scores over the boards of each view."""
    return np.stack([np.bincount(view, weights * score) for score in scores])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/talk.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parsed = parser.parse_args(arguments)
    try:
        config = load_config(parsed.config, parsed.overrides)
    except SettingsError as error:
        parser.error(str(error))
    recipe = config.game.options
    if config.game.name != "matching" or recipe.size != 2 or recipe.scale:
        parser.error("the game must be matching with size=2 and scale=false")
    found = boards(recipe)
    bound = "without messages at most" if config.rollout.max_turns == 3 else "one proposal at most"
    print(f"{bound} {silent(found):.4f}")
    print(f"with messages that only say who proposes at least {who_proposes(found):.4f}")


if __name__ == "__main__":
    main()
