"""Plays scripted players on new instances and prints their scores as a Markdown table.

    python -m bench.scripted_figures --num 1000
    python -m bench.scripted_figures --num 2000 --board 2x2

The score is the mean share of the best matching, with its standard error. Turns, messages, words of
messages and rejections are means per game. Unfinished games score 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dialop.logged import Rules
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.generate import MatchingRecipe
from dialop.matching.kit import generate
from dialop.matching.scripted import make_scripted

BOARDS = {
    "8x8": (MatchingRecipe(), Rules(private_reasoning=True)),
    "4x4": (MatchingRecipe(size=4), Rules(private_reasoning=True)),
    "2x2": (
        MatchingRecipe(size=2, p_observed=0.5, scale=False, max_value=10, keep="exactly_one"),
        Rules(brief=True, private_reasoning=True),
    ),
    "3x3": (
        MatchingRecipe(size=3, p_observed=0.5, scale=False, max_value=10),
        Rules(brief=True, private_reasoning=True),
    ),
}
PAIRS = (
    ("random", "random"),
    ("solo", "solo"),
    ("honest", "honest"),
    ("honest:think=swaps", "honest:think=swaps"),
    ("honest:reply=tell", "honest:reply=tell"),
    ("honest:tell=top", "honest:tell=top"),
    ("honest:tell=rows", "honest:tell=rows"),
    ("honest:plan=own", "honest:plan=own"),
    ("honest:plan=guess", "honest:plan=guess"),
    ("honest:plan=random", "honest:plan=random"),
    ("honest:plan=own", "honest:plan=own"),
    ("honest:plan=guess", "honest:plan=guess"),
    ("honest:plan=random", "honest:plan=random"),
    ("honest", "solo"),
    ("honest", "random"),
)
MAX_TURNS = 30


def main() -> None:
    """Generate instances, have every pair play all of them, and print one row per pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--num", type=int, default=1000, help="number of instances")
    parser.add_argument("--board", choices=BOARDS, default="8x8", help="kind of instance")
    parser.add_argument("--seed", type=int, default=1_000_003, help="seed of the instances")
    args = parser.parse_args()
    recipe, options = BOARDS[args.board]
    begin_s = time.perf_counter()
    instances = generate(recipe, seed=args.seed, num=args.num)
    print(f"{args.num / (time.perf_counter() - begin_s):.1f} instances/s on one core\n")
    print_reference_points(instances)
    print("\n| seats | score | agreed | turns | messages | words | rejections | games/s |")
    print("|---|---|---|---|---|---|---|---|")
    for pair in PAIRS:
        print(row(instances, pair, options=options), flush=True)


def print_reference_points(instances: Sequence[MatchingInstance]) -> None:
    """Print the reference values of the instances, to compare with those of the specification."""
    best = [float(i.best) for i in instances]
    solo = [i.norm(s) for i in instances for s in i.solo]
    better = [i.norm(max(i.solo)) for i in instances]
    own = [sum(map(sum, mask)) for i in instances for mask in i.masks]
    union = [
        sum(a | b for rows in zip(*i.masks, strict=True) for a, b in zip(*rows, strict=True))
        for i in instances
    ]
    print(f"best: mean {statistics.fmean(best):.1f}, sd {statistics.stdev(best):.1f}, ", end="")
    print(f"range {min(best):.0f} to {max(best):.0f}")
    print(f"cells seen: {statistics.fmean(own):.1f} a seat, {statistics.fmean(union):.1f} together")
    print(f"solo plan: {statistics.fmean(solo):.3f}, better one: {statistics.fmean(better):.3f}")
    if instances[0].size == 2:
        print(f"best plan from own cells alone: {best_unheard(instances):.3f}")


def best_unheard(instances: Sequence[MatchingInstance]) -> float:
    """The mean share of the best value of the best plan that depends on one seat's cells alone.

    Two reviewers and two papers have two plans, the table's diagonals. By how much the first is
    worth more, on average to a seat that sees given cells, is counted on nine of ten instances; the
    plans chosen by it are valued on the tenth. Such a plan is better than the solo plan, because
    boards are kept by what solo plans are worth.
    """
    leads: dict[bytes, float] = defaultdict(float)
    for number, instance in enumerate(instances):
        for view_RP, shares in own_views(instance) if number % 10 else ():
            leads[view_RP.tobytes()] += shares[0] - shares[1]
    return statistics.fmean(
        shares[0 if leads[view_RP.tobytes()] > 0 else 1]
        for instance in instances[::10]
        for view_RP, shares in own_views(instance)
    )


def own_views(instance: MatchingInstance) -> list[tuple[NDArray[np.int_], tuple[float, float]]]:
    """For each seat of a 2x2 board its cells (-1: not seen) and what the two plans are worth."""
    table_RP = np.array(instance.table)
    first, second = (instance.norm(float(np.trace(t))) for t in (table_RP, table_RP[::-1]))
    return [(np.where(mask, table_RP, -1), (first, second)) for mask in np.array(instance.masks)]


def row(instances: Sequence[MatchingInstance], specs: tuple[str, str], *, options: Rules) -> str:
    """One pair's figures. The players change seats after every second instance."""
    norms: list[float] = []
    totals = dict.fromkeys(("agreed", "turns", "messages", "words", "rejections"), 0)
    begin_s = time.perf_counter()
    for number, instance in enumerate(instances):
        game = MatchingGame(instance, options)
        # The first seat alternates with the index, so players change seats every two instances.
        seats = specs if number // 2 % 2 == 0 else specs[::-1]
        players = [make_scripted(s, seed=2 * number + seat) for seat, s in enumerate(seats)]
        while (seat := game.seat_to_move) is not None and len(game.view(0).log) < MAX_TURNS:
            view = game.view(seat)
            game.step(seat, players[seat].act(view))
        log, outcome = game.view(0).log, game.outcome()
        norms.append(outcome.score_norm)
        totals["agreed"] += outcome.agreed
        totals["turns"] += len(log)
        totals["messages"] += sum(a.kind == "message" for a in log)
        totals["words"] += sum(len(a.text.split()) for a in log if a.kind == "message")
        totals["rejections"] += sum(a.kind == "reject" for a in log)
    wall_s = time.perf_counter() - begin_s
    error = statistics.stdev(norms) / math.sqrt(len(norms))
    means = " | ".join(f"{total / len(norms):.2f}" for total in totals.values())
    score = f"{statistics.fmean(norms):.3f} ± {error:.3f}"
    return f"| {specs[0]} / {specs[1]} | {score} | {means} | {len(norms) / wall_s:.0f} |"


if __name__ == "__main__":
    main()
