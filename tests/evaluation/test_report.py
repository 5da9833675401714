"""Recorded games as text."""

import json
from typing import Any

from selfplay.metrics.tables import columns_of, game_text


def turn(seat: int, text: str, error: str | None = None) -> dict[str, Any]:
    return {"seat": seat, "text": text, "error": error, "observations": ["", ""], "trained": True}


def record() -> dict[str, Any]:
    """A 2 by 2 game with one refused move, as it comes back from a line of games.jsonl."""
    game = {
        "step": 40,
        "instance": "g12",
        "episode": 3,
        "score_norm": 0.97,
        "agreed": True,
        "ended": "finished",
        "seats": [
            {"player": "policy", "system": "Match them.", "user": "  A B\nX 4 .\nY . 7"},
            {"player": "scripted:honest", "system": "Match them.", "user": "  A B\nX . 2"},
        ],
        "turns": [
            turn(0, "[message] X A 4"),
            turn(1, "[propose] X", "Error: one line a paper."),
            turn(1, "[propose]\nProposal:\nA: X"),
            turn(0, "[accept]"),
        ],
        "facts": {"best": 11.0, "solo_0": 0.7},
    }
    return json.loads(json.dumps(game))


def test_a_game_as_text() -> None:
    """The rules once, each seat's view, every turn with its seat, the outcome."""
    text = game_text(record(), width=80)
    assert text.count("Match them.") == 1 and max(map(len, text.splitlines())) <= 80
    in_order = ("g12", "Match them.", "X 4 .", "X . 2", "[message] X A 4", "[propose] X")
    in_order += ("Error: one line a paper.", "A: X", "[accept]", "0.970")
    places = [text.index(part) for part in in_order]
    assert places == sorted(places)
    speakers = [line.split()[:3] for line in text.splitlines() if "[" in line]
    assert [seat for _, seat, _ in speakers] == ["0", "1", "1", "0"]


def test_different_rules_are_shown_with_each_seats_view() -> None:
    game = record()
    game["seats"][1]["system"] = "You advise."
    text = game_text(game, width=80)
    assert "── rules" not in text and "Match them.\n\n  A B" in text and "You advise.\n\n" in text


def test_a_games_own_measure_has_a_column() -> None:
    columns = columns_of([{"score": 1.0, "days_named": 2.0, "errors_no_day": 1.0, "turns": 3.0}])
    assert [name for name, _, _ in columns] == ["turns", "days_named"]


def test_a_game_without_agreement_says_why() -> None:
    game = record()
    game.update(agreed=False, ended="turns", score_norm=0.0, turns=[turn(0, "")], facts={})
    text = game_text(game)
    assert "no agreement" in text and "turns" in text.splitlines()[-1]
