"""Plays scripted players on new instances and prints their scores as a Markdown table.

    python -m bench.scripted_figures --num 1000                    # matching, 8x8
    python -m bench.scripted_figures --num 20480 --of 2x2          # as in configs/talk.yaml
    python -m bench.scripted_figures --num 1000 --of city --seed 404
    python -m bench.scripted_figures --num 1000 --of calendar

The score is the game's, 0 to 1, with its standard error; 0 for a game that is not over after
MAX_MOVES. Moves, messages, their words, proposals, searches and rejections are means per game.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.rows import count
from dialop.kit import Kit, load_kit

THINKS = {"private_reasoning": True}
TINY_CITY = {"sites": 6, "slots": 1, "preferences": 1, "distance": False, "simple": True, **THINKS}
NO_PRICES = {"p_shared": 0.0, "max_price_pref": 0, "max_arrival_pref": 0}
TINY_BOARD = {"size": 2, "scale": False, "max_value": 10}
INSTANCES: dict[str, tuple[str, dict[str, Any]]] = {
    "8x8": ("matching", THINKS),
    "2x2": ("matching", {**TINY_BOARD, "split_rows": True, "skew": 3.0, "keep": "random"}),
    "2x2_cells": ("matching", {**TINY_BOARD, "p_observed": 0.5, "keep": "exactly_one"}),
    "city": ("planning", THINKS),
    "tiny_city": ("planning", TINY_CITY),
    "calendar": ("mediation", THINKS),
    "tiny_calendar": ("mediation", {"keep_flights": 4, "events": 3, "brief": True, **NO_PRICES}),
}
TEAMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "matching": (
        *(("random", "random"), ("solo", "solo"), ("honest", "honest")),
        *(("honest:tell=top",) * 2, ("honest:tell=rows",) * 2),
    ),
    "planning": (
        *(("teller", "searcher"), ("teller:rounds=1", "searcher"), ("teller:rounds=2", "searcher")),
        *(("teller:tell=one", "searcher"), ("teller", "searcher:by=filter")),
        *(("teller", "guesser"), ("silent", "guesser")),
        ("teller:rounds=3,score=total", "searcher:think=points,plans=4"),
        ("teller:rounds=3,score=total", "searcher:think=points,plans=4,stray=0.9"),
    ),
    "mediation": tuple(
        (spec,) * 3
        for spec in (
            *("random", "solo", "honest:tell=top", "honest", "honest:tell=calendar"),
            *("honest:tell=top,probe=1", "honest:probe=1", "honest:tell=calendar,probe=1"),
            *("honest:tell=calendar,probe=2", "honest:think=values"),
            *("honest:think=values,stray=0.8", "solo:think=values,stray=0.8"),
        )
    ),
}
# Teams that play, too, where an option of their game is off.
WITHOUT: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "planning": {
        "messages": (("teller:rounds=9", "guesser"),),
        "search": (("teller:rounds=3,score=total", "searcher"),),
    },
    "mediation": {"messages": (("solo",) * 3, ("solo:strict=5",) * 3)},
}
COUNTED = ("message", "propose", "tool", "reject")
MAX_MOVES = 100


def main(argv: Sequence[str] | None = None) -> None:
    """Generate instances, have every team play all of them, and print one row per team."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=count, default=1000, help="number of instances")
    parser.add_argument("--of", choices=INSTANCES, default="8x8", help="kind of instance")
    parser.add_argument("--seed", type=int, default=1_000_003, help="seed of the instances")
    args = parser.parse_args(argv)
    name, words = INSTANCES[args.of]
    kit = load_kit(name)
    options = kit.Options(**words)
    begin_s = time.perf_counter()
    instances = kit.generate(options, seed=args.seed, start=0, num=args.num)
    print(f"{args.num / (time.perf_counter() - begin_s):.1f} instances/s on one core")
    print(
        "\n| team | score | agreed | moves | messages | words | proposals | searches | rejections |"
    )
    print(f"|---|{'--:|' * 8}")
    for team in TEAMS[name]:
        if options.private_reasoning or "think=" not in " ".join(team):
            print(row(kit, instances, team, options), flush=True)
    for option, teams in WITHOUT.get(name, {}).items():
        print(f"\nwithout {option}:")
        for team in teams:
            print(row(kit, instances, team, replace(options, **{option: False})), flush=True)


def row(kit: Kit, instances: Sequence[Any], team: tuple[str, ...], options: Any) -> str:
    """One team's figures. Two players change seats after every second instance of matching."""
    scores, num_agreed, num = [], 0, Counter[str]()
    for number, instance in enumerate(instances):
        game = kit.new_game(instance, options)
        turned = kit.name == "matching" and number // 2 % 2
        specs = team[::-1] if turned else team
        seeds = (2 * number, 2 * number + 1) if len(team) == 2 else (number,) * len(team)
        players = [kit.make_script(s, seed=seed) for s, seed in zip(specs, seeds, strict=True)]
        for _ in range(MAX_MOVES):
            if (seat := game.seat_to_move) is None:
                break
            text = players[seat].act(game.view(seat))
            step = game.step(seat, text)
            num["moves"] += 1
            num[str(step.action)] += 1
            num["words"] += len(text.partition("[message]")[2].split())
        outcome = game.outcome()
        scores.append(outcome.score_norm)
        num_agreed += outcome.agreed
    error = statistics.stdev(scores) / math.sqrt(len(scores))
    shown = [num_agreed, num["moves"], num["message"], num["words"]]
    shown += [num[kind] for kind in COUNTED[1:]]
    means = " | ".join(f"{total / len(scores):.2f}" for total in shown)
    name = " / ".join(dict.fromkeys(team))
    return f"| {name} | {statistics.fmean(scores):.3f} ± {error:.3f} | {means} |"


if __name__ == "__main__":
    main()
