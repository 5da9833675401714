"""Plays scripted players of mediation on new instances and prints their scores as a Markdown table.

    python -m bench.mediation_figures --num 1000
    python -m bench.mediation_figures --num 1000 --tiny

The score is the place between the worst and the best pair, with its standard error. Moves, messages
and proposals are means per game. Games that are not over after 30 moves score 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence

from dialop.logged import Rules
from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.kit import figures, generate
from dialop.mediation.records import MediationInstance
from dialop.mediation.scripted import make_scripted
from dialop.mediation.search import with_references

TINY = MediationRecipe(keep_flights=4, events=3, p_shared=0.0, max_price_pref=0, max_arrival_pref=0)
TEAMS = (
    ("random", True),
    ("solo", True),
    ("honest:tell=top", True),
    ("honest", True),
    ("honest:tell=calendar", True),
    ("honest:tell=top,probe=1", True),
    ("honest:probe=1", True),
    ("honest:tell=calendar,probe=1", True),
    ("honest:tell=calendar,probe=2", True),
    ("solo", False),
    ("solo:strict=5", False),
)
MAX_MOVES = 30


def main() -> None:
    """Generate instances, have every team play all of them, and print one row per team."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--num", type=int, default=1000, help="number of instances")
    parser.add_argument("--seed", type=int, default=1_000_003, help="seed of the instances")
    parser.add_argument("--tiny", action="store_true", help="the instances of tiny_mediation.yaml")
    args = parser.parse_args()
    begin_s = time.perf_counter()
    instances = generate(TINY if args.tiny else MediationRecipe(), seed=args.seed, num=args.num)
    print(f"{args.num / (time.perf_counter() - begin_s):.0f} instances/s on one core, ", end="")
    begin_s = time.perf_counter()
    for instance in instances:
        with_references(instance)
    print(f"best and worst in {1000 * (time.perf_counter() - begin_s) / args.num:.2f} ms")
    print(figures(instances))
    print("\n| team | messages | score | agreed | moves | messages | proposals |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for spec, messages in TEAMS:
        print(row(instances, spec, Rules(messages=messages, brief=args.tiny)), flush=True)


def row(instances: Sequence[MediationInstance], spec: str, options: Rules) -> str:
    """One team's figures: the same player in all three seats."""
    norms: list[float] = []
    totals = dict.fromkeys(("agreed", "moves", "messages", "proposals"), 0)
    for number, instance in enumerate(instances):
        game = MediationGame(instance, options)
        player = make_scripted(spec, seed=number)
        while (seat := game.seat_to_move) is not None and len(game.view(2).log) < MAX_MOVES:
            game.step(seat, player.act(game.view(seat)))
        log, outcome = game.view(2).log, game.outcome()
        norms.append(outcome.score_norm)
        totals["agreed"] += outcome.agreed
        totals["moves"] += len(log)
        totals["messages"] += sum(act.kind == "message" for act in log)
        totals["proposals"] += sum(act.kind == "propose" for act in log)
    error = statistics.stdev(norms) / math.sqrt(len(norms))
    means = " | ".join(f"{total / len(norms):.2f}" for total in totals.values())
    allowed = "yes" if options.messages else "no"
    return f"| {spec} | {allowed} | {statistics.fmean(norms):.3f} ± {error:.3f} | {means} |"


if __name__ == "__main__":
    main()
