"""Shows where a policy that writes a private table before it proposes loses value.

    python -m bench.plan_loss runs/scratch_h200

Reads the games that the run kept in `games.jsonl`, of generated instances with a private table of
levels 0 to 9 before the proposal, and evaluates each game's first legal proposal. Prints a row for
each third of the run, with means over games. Values are shares of the best possible plan's value:

- true levels: the best plan of the table that a teacher would write (own and stated cells);
- written levels: the best plan of the table that the seat wrote;
- proposed: the plan that it proposed;
- search: the proposed plan over the best one, both valued by the written levels;
- levels right: the share of cells in which the written table equals the teacher's.

A loss between the first two columns is misreading, between the next two failed search.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dialop.matching.board import MatchingView
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.pooling import (
    best_plan,
    levels,
    plan_value,
    pooled_table,
    stated_by,
    value_range,
)
from dialop.matching.statements import stated_cells
from selfplay.config import Config, load_config
from selfplay.data.instances import GENERATED, TRAIN, generated
from selfplay.games import kit_of


@dataclass(frozen=True, slots=True)
class Loss:
    """The figures of one proposal."""

    true_levels: float
    written_levels: float
    proposed: float
    search: float
    levels_right: float


COLUMNS = tuple(name.replace("_", " ") for name in Loss.__slots__)


def follow(record: dict[str, Any], instance: MatchingInstance, config: Config) -> Loss | None:
    """The figures of a game's first legal proposal.

    None if there is no such proposal, or no complete table before it.
    """
    game: MatchingGame = kit_of(config.game).new_game(instance, config.game)
    for turn in record["turns"]:
        view = game.view(turn["seat"])
        if game.step(turn["seat"], turn["text"]).action != "propose":
            continue
        written = _written(turn["text"].partition("[propose]")[0], view)
        pairs = game.view(turn["seat"]).log[-1].pairs
        assert pairs is not None
        if written is None:
            return None
        stated = stated_by(view, seat=1 - turn["seat"])
        right = levels(pooled_table(view, stated), value_range(view, stated)).astype(float)
        true = np.array(instance.table, float)
        by_levels = [best_plan(table) for table in (right, written)]
        return Loss(
            *(plan_value(true, plan) / instance.best for plan in (*by_levels, pairs)),
            search=plan_value(written, pairs) / plan_value(written, by_levels[1]),
            levels_right=float((written == right).mean()),
        )
    return None


def _written(thought: str, view: MatchingView) -> np.ndarray | None:
    """The table [reviewer, paper] in a private text, None if a cell is missing. A level may stand
    after the value that it comes from (`476=8`)."""
    lines = re.sub(r"\S+=", "", thought)
    cells = {(reviewer, paper): level for reviewer, paper, level in stated_cells(lines, view)}
    if len(cells) < view.size**2:
        return None
    return np.array([[cells[r, p] for p in range(view.size)] for r in range(view.size)], float)


def losses(folder: Path) -> list[tuple[int, Loss | None]]:
    """The step and figures of each kept game. Raises ValueError for a run without such games."""
    config = load_config(folder / "config.yaml", ["data.processes=1"])
    drawn = config.data.train == GENERATED
    if config.game.name != "matching" or not config.game.private_reasoning or not drawn:
        raise ValueError(
            f"{folder} must be a run of generated matching games with game.private_reasoning: true"
        )
    results = []
    for line in (folder / "games.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        index = int(record["instance"].rpartition("/")[2])
        [instance] = generated(TRAIN, game=config.game, seed=config.seed, start=index, num=1)
        results.append((record["step"], follow(record, instance, config)))
    if not results:
        raise ValueError(f"{folder}/games.jsonl holds no games; set log_games_every to keep some")
    return results


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder with games.jsonl")
    try:
        results = losses(parser.parse_args(words).run)
    except (ValueError, OSError) as error:
        sys.exit(f"bench.plan_loss: {error}")
    last = max(step for step, _ in results)
    print(f"| steps | games | {' | '.join(COLUMNS)} |\n|---|{'--:|' * (1 + len(COLUMNS))}")
    for third in range(3):
        first, end = (1 + last * bound // 3 for bound in (third, third + 1))
        kept = [astuple(loss) for step, loss in results if loss and first <= step < end]
        if kept:
            means = " | ".join(f"{mean:.3f}" for mean in np.mean(kept, axis=0))
            print(f"| {first}–{end - 1} | {len(kept)} | {means} |")
    left_out = sum(loss is None for _, loss in results)
    print(
        f"\n{left_out} of {len(results)} games have no legal proposal or no full table: left out."
    )


if __name__ == "__main__":
    main()
