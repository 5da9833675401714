"""The matching game as `dialop.kit` describes a game: its settings, instances, files, players."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, cast

from dialop.logged import Rules, part_of
from dialop.matching import scripted
from dialop.matching.board import MatchingInstance
from dialop.matching.game import MatchingGame
from dialop.matching.generate import MatchingRecipe, generate_instance
from dialop.matching.recorded import replay
from dialop.matching.solve import best_value, solo_value
from dialop.matching.store import read_instances as read
from dialop.matching.store import write_instances as write

__all__ = ["make_script", "read", "replay", "restore", "write"]

ROLES: tuple[str, ...] = ("player", "player")
SCRIPT_NAMES: tuple[str, ...] = scripted.NAMES
BASELINES: tuple[str, ...] = ("honest", "solo", "random")
PLAYED_BY_PEOPLE: bool = True
make_script = scripted.make_scripted
restore = MatchingGame.from_state


@dataclass(frozen=True)
class Options(MatchingRecipe, Rules):
    """The recipe of instances and the rules of play."""


def generate(
    options: MatchingRecipe, *, seed: int, num: int, start: int = 0
) -> list[MatchingInstance]:
    """Boards start..start+num-1 of the stream `seed`."""
    return [generate_instance(options, seed=seed, index=start + i) for i in range(num)]


def new_game(instance: MatchingInstance, options: Rules) -> MatchingGame:
    """A game on a board, at its start."""
    return MatchingGame(instance, part_of(options, Rules))


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


def figures(instances: Sequence[MatchingInstance]) -> str:
    """Mean values of the best plan and of the seats' own, and the number of cells that they see."""
    solo = [instance.norm(value) for instance in instances for value in instance.solo]
    num_visible = [sum(map(sum, mask)) for instance in instances for mask in instance.masks]
    return (
        f"best {fmean(float(i.best) for i in instances):.1f}, solo plan {fmean(solo):.3f}, "
        f"better solo plan {fmean(i.norm(max(i.solo)) for i in instances):.3f}, "
        f"cells a seat sees {fmean(num_visible):.1f}"
    )


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a recorded game is one of matching."""
    return "table" in record
