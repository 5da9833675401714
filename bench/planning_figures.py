"""Plays scripted users and agents of planning on new instances; prints a Markdown table.

    python -m bench.planning_figures --num 1000
    python -m bench.planning_figures --num 1000 --city small

The score is the mean place of the agreed plan between the worst (0) and the best (1), with its
standard error. Moves, searches, proposals and words of messages are means per game.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence

from dialop.planning.board import PlanningInstance, PlanningOptions
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe
from dialop.planning.kit import generate
from dialop.planning.scripted import make_scripted

CITIES = {
    "full": PlanningRecipe(),
    "small": PlanningRecipe(sites=6, slots=1, preferences=1, distance=False, simple=True),
}
PAIRS = (
    ("teller", "searcher"),
    ("teller:rounds=1", "searcher"),
    ("teller:rounds=2", "searcher"),
    ("teller:tell=one", "searcher"),
    ("teller", "searcher:by=filter"),
    ("teller", "guesser"),
    ("silent", "guesser"),
)
MAX_MOVES = 100


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1000, help="instances")
    parser.add_argument("--city", choices=CITIES, default="full", help="which instances")
    args = parser.parse_args(argv)
    instances = generate(CITIES[args.city], seed=404, num=args.num)
    print("| user | agent | score | moves | searches | proposals | words |")
    print("|---|---|---|---|---|---|---|")
    for user, agent in PAIRS:
        games = [played(i, (user, agent), seed) for seed, i in enumerate(instances)]
        scores = [game.outcome().score_norm for game, _ in games]
        error = statistics.pstdev(scores) / math.sqrt(len(scores))
        measured = [game.measures((0, 1)) for game, _ in games]
        moves = statistics.fmean(num for _, num in games)
        means = [
            f"{statistics.fmean(m[name] for m in measured):.1f}"
            for name in ("searches", "proposals", "words")
        ]
        score = f"{statistics.fmean(scores):.3f} ± {error:.3f}"
        print(f"| `{user}` | `{agent}` | {score} | {moves:.1f} | {' | '.join(means)} |")


def played(
    instance: PlanningInstance, specs: tuple[str, str], seed: int
) -> tuple[PlanningGame, int]:
    """A scripted game and the number of its moves."""
    game = PlanningGame(instance, PlanningOptions())
    players = [make_scripted(spec, seed=2 * seed + seat) for seat, spec in enumerate(specs)]
    num = 0
    while (seat := game.seat_to_move) is not None and num < MAX_MOVES:
        game.step(seat, players[seat].act(game.view(seat)))
        num += 1
    return game, num


if __name__ == "__main__":
    main()
