"""The readings of games whose answers are known: the teacher's points, the pair that it books."""

from __future__ import annotations

import re
from typing import Any

from bench.readings import mediation, planning
from selfplay.config import load_config
from selfplay.data.instances import generated
from selfplay.metrics.step import game_record
from selfplay.rollout.driver import play_scripted
from selfplay.rollout.episode import limits_of
from selfplay.rollout.seating import scripted_games


def record_of(game: str, spec: str, *words: str) -> dict[str, Any]:
    """A scripted game. Numbers and the sites of a plan are tokens of 1 nat, all others have 0."""
    config = load_config(None, [f"game={{name: {game}, brief: true}}", "model.path=x", *words])
    instances = generated("test", game=config.game, seed=3, start=0, num=1)
    setups = scripted_games(instances, spec=spec, game=config.game)
    (episode,) = play_scripted(setups, limits=limits_of(config.rollout))
    record = game_record(episode, step=1)
    for turn in record["turns"]:
        pieces = re.split(
            r"(\|-?\d+|(?<=id )\d|(?<= \[)[^],]+|(?<=, )[^],]+(?=[],]))", turn["text"]
        )
        turn["tokens"] = [(piece, -float(place % 2)) for place, piece in enumerate(pieces)]
    return record


def test_a_teachers_points_are_right_and_other_points_are_not() -> None:
    words = ("game.private_reasoning=true", "rollout.max_turns=20")
    record = record_of("planning", "searcher:legs=1,think=points", *words)
    num = len(record["state"]["instance"]["sites"])
    head, right, *_ = planning({"before": [record]})
    assert head == f"1 of 1 games, {num} points"
    assert right.startswith("equal to the teacher's 1.00,") and "correlation 1.00" in right
    for turn in record["turns"]:
        turn["text"] = re.sub(r"\|(-?\d+)$", r"|9\1", turn["text"], flags=re.MULTILINE)
        turn["text"] = turn["text"].replace("|9-", "|-9")
    _, wrong, *_ = planning({"before": [record]})
    assert wrong.startswith("equal to the teacher's 0.00,")


def test_ids_are_read_from_plans_and_costs_against_the_best_pair() -> None:
    record = record_of("mediation", "honest", "rollout.max_turns=20")
    first = next(mediation({"after": [record]}))
    assert first.startswith("after: 1 games; an id 1.") or "an id 2." in first
    best = record["state"]["play"]
    best["agreed"] = best_pair(record)
    lines = list(mediation({"after": [record]}))
    assert lines[2].endswith("calendar, price, arrival: 0.0, 0.0, 0.0")
    assert not lines[3].endswith("0.0, 0.0, 0.0")


def best_pair(record: dict[str, Any]) -> list[int]:
    """The pair with the highest score, by trying all of them."""
    from dialop.mediation.game import MediationGame
    from dialop.mediation.score import pair_costs

    instance = MediationGame.from_state(record["state"]).instance
    sizes = [range(len(user.flights)) for user in instance.users]
    pairs = [(a, b) for a in sizes[0] for b in sizes[1]]
    return list(max(pairs, key=lambda pair: sum(c.total for c in pair_costs(instance, pair))))
