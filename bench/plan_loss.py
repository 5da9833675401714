"""Where a pair that writes the table down before it proposes loses the worth of its plan.

    python -m bench.plan_loss runs/scratch_h200

Reads the games that the run kept (`games.jsonl`, drawn instances, a private table of levels 0 to 9
before the proposal) and follows each game's first legal proposal from the cells to the plan. A row
for each third of the run, means over games, worth as shares of the best possible plan's:

- true levels: the best plan of the table that teachers would have written (told and own cells);
- written levels: the best plan of the table that the seat did write;
- proposed: the plan it proposed;
- search: the proposed plan over the best one, both by the levels it wrote;
- levels right: the share of cells written as a teacher would.

What lies between the first two is misreading, between the next two a search that failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dialop.matching.board import MatchingView
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.pooling import best_plan, levels, pooled_table, told_cells, value_range, worth
from dialop.matching.statements import stated_cells
from selfplay.config import Config, load_config
from selfplay.data.instances import GENERATED, TRAIN, generated
from selfplay.games import kit_of


@dataclass(frozen=True, slots=True)
class Loss:
    """One proposal's way from the cells to the plan."""

    true_levels: float
    written_levels: float
    proposed: float
    search: float
    levels_right: float


COLUMNS = tuple(name.replace("_", " ") for name in Loss.__slots__)


def follow(record: dict[str, Any], instance: MatchingInstance, config: Config) -> Loss | None:
    """None for a game whose first legal proposal has no whole table before it, or that has none."""
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
        told = told_cells(view, seat=1 - turn["seat"])
        right = levels(pooled_table(view, told), value_range(view, told)).astype(float)
        true = np.array(instance.table, float)
        by_levels = [best_plan(table) for table in (right, written)]
        return Loss(
            *(worth(true, plan) / instance.best for plan in (*by_levels, pairs)),
            search=worth(written, pairs) / worth(written, by_levels[1]),
            levels_right=float((written == right).mean()),
        )
    return None


def _written(thought: str, view: MatchingView) -> np.ndarray | None:
    """The table [reviewer, paper] of a thought, None where a cell is missing."""
    cells = {(reviewer, paper): level for reviewer, paper, level in stated_cells(thought, view)}
    if len(cells) < view.size**2:
        return None
    return np.array([[cells[r, p] for p in range(view.size)] for r in range(view.size)], float)


def losses(folder: Path) -> list[tuple[int, Loss | None]]:
    """Step and loss of each kept game. Raises ValueError for a run without such games."""
    config = load_config(folder / "config.yaml", ["data.processes=1"])
    drawn = config.data.train == GENERATED
    if config.game.name != "matching" or not config.game.private_reasoning or not drawn:
        raise ValueError(
            f"{folder} must be a run of drawn matching games with game.private_reasoning: true"
        )
    found = []
    for line in (folder / "games.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        index = int(record["instance"].rpartition("/")[2])
        [instance] = generated(TRAIN, game=config.game, seed=config.seed, start=index, num=1)
        found.append((record["step"], follow(record, instance, config)))
    if not found:
        raise ValueError(f"{folder}/games.jsonl holds no games: log_games_every decides which")
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder with games.jsonl")
    try:
        found = losses(parser.parse_args(words).run)
    except (ValueError, OSError) as error:
        sys.exit(f"bench.plan_loss: {error}")
    last = max(step for step, _ in found)
    print(f"| steps | games | {' | '.join(COLUMNS)} |\n|---|{'--:|' * (1 + len(COLUMNS))}")
    for third in range(3):
        first, end = (1 + last * bound // 3 for bound in (third, third + 1))
        kept = [astuple(loss) for step, loss in found if loss and first <= step < end]
        if kept:
            means = " | ".join(f"{mean:.3f}" for mean in np.mean(kept, axis=0))
            print(f"| {first}–{end - 1} | {len(kept)} | {means} |")
    left_out = sum(loss is None for _, loss in found)
    print(
        f"\n{left_out} of {len(found)} games without a legal proposal or a whole table: left out."
    )


if __name__ == "__main__":
    main()
