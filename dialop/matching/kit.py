"""The matching game as `dialop.kit` describes a game: for `python -m dialop check` and bridges.

The trainer reads the same rules from the keys of its section `game`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from dialop.kit import option
from dialop.matching import scripted
from dialop.matching.board import MatchingInstance, MatchingOptions
from dialop.matching.game import MatchingGame
from dialop.matching.generate import KEEPS, Keep, MatchingRecipe, generate_many
from dialop.matching.recorded import replay
from dialop.matching.solve import best_value, solo_value
from dialop.matching.store import read_instances as read
from dialop.matching.store import write_instances as write

__all__ = ["read", "replay", "write"]

ROLES: tuple[str, ...] = ("player", "player")
SCRIPT_NAMES: tuple[str, ...] = scripted.NAMES
BASELINES: tuple[str, ...] = ("honest", "solo", "random")
PLAYED_BY_PEOPLE: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """What `MatchingRecipe` and `MatchingOptions` describe."""

    size: int = option(8, "number of rows and of columns of the board", low=2, high=8)
    p_observed: float = option(0.4, "probability that a seat sees a cell", low=0.01, high=1.0)
    scale: bool = option(True, "multiply each seat's values by a private factor from 1 to 10")
    max_value: int = option(100, "cell values are integers below this", low=2, high=10_000)
    hardness: float = option(
        1.25, "a solo plan is weak if its value times this is below the best", low=1.0, high=1000.0
    )
    keep: str = option("both", "seats whose solo plans must be weak", choices=KEEPS)
    messages: bool = True
    brief: bool = False
    private_reasoning: bool = False


def generate(options: Options, *, seed: int, start: int, num: int) -> list[MatchingInstance]:
    """Boards start..start+num-1 of the stream `seed`."""
    recipe = MatchingRecipe(
        size=options.size,
        p_observed=options.p_observed,
        scale=options.scale,
        max_value=options.max_value,
        hardness=options.hardness,
        keep=cast(Keep, options.keep),
    )
    return generate_many(recipe, seed=seed, start=start, num=num)


def new_game(instance: MatchingInstance, options: Options) -> MatchingGame:
    """A game on a board, at its start."""
    rules = MatchingOptions(
        messages=options.messages,
        brief=options.brief,
        private_reasoning=options.private_reasoning,
    )
    return MatchingGame(instance, rules)


def restore(state: Mapping[str, Any]) -> MatchingGame:
    """The game that `MatchingGame.state` described."""
    return MatchingGame.from_state(dict(state))


def make_script(spec: str, *, seed: int) -> scripted.ScriptedPlayer:
    """A scripted player from a spec such as "honest:tell=top,slip=0.05"."""
    return scripted.make_scripted(spec, seed=seed)


def vary(instance: MatchingInstance, seat: int, *, seed: int) -> MatchingInstance | None:
    """The board with other values in the cells that only this seat sees."""
    mine, other = instance.masks[seat], instance.masks[1 - seat]
    draw = random.Random(seed)
    table = tuple(
        tuple(
            draw.randrange(instance.max_value) if mine[r][p] and not other[r][p] else value
            for p, value in enumerate(row)
        )
        for r, row in enumerate(instance.table)
    )
    if table == instance.table:
        return None
    solo = cast("tuple[float, float]", tuple(_solo(instance, table, s) for s in (0, 1)))
    return replace(instance, table=table, best=best_value(table), solo=solo)


def _solo(instance: MatchingInstance, table: Sequence[Sequence[int]], seat: int) -> float:
    return float(solo_value(table, instance.masks[seat], unknown=instance.unknown))
