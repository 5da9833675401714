"""What mediation gives the trainer: options, starts from recorded games, phrases, variations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dialop.kit import load_kit
from dialop.mediation.kit import Options
from selfplay.config import load_config
from selfplay.evaluation.evaluate import evaluate_people
from tests.helpers.dialop_boards import human_games

KIT = load_kit("mediation")


@pytest.mark.parametrize("flights", [3, 12])
def test_phrases_are_found_in_the_texts_of_the_brief_style(flights: int) -> None:
    options = Options(keep_flights=flights, events=2 if flights == 3 else 0, brief=True)
    options = replace(options, private_reasoning=True)
    think = "" if flights == 3 else ",think=values"
    instances = KIT.generate(options, seed=0, start=0, num=20)
    phrases = KIT.phrases(instances, options, split_lines=False)
    assert len(set(phrases)) == len(phrases)
    texts = []
    for instance in instances:
        game = KIT.new_game(instance, options)
        player = KIT.make_script(f"honest:probe=1{think}", seed=0)
        while (seat := game.seat_to_move) is not None:
            text = player.act(game.view(seat))
            texts += [text, *game.step(seat, text).observations]
        texts += [game.prompt(each).user for each in range(3)]
    whole = "\n".join(texts)
    # Some costs and prices did not occur; the agent asks nobody who has told, and restores nothing.
    prices = tuple(f" {n}" for n in range(13, 400))
    rare = (" -", "0: [message]", "1: [message]", "Agent:", "You:", *prices)
    assert [p for p in phrases if p not in whole and not p.startswith(rare)] == []
    assert KIT.phrases(instances, replace(options, brief=False), split_lines=False) == []


def test_people_are_tallied() -> None:
    path = human_games("mediation")
    record = json.loads(path.read_text().splitlines()[0])
    instance = KIT.read(path)[0]
    tally = KIT.recorded_tally(record, instance)
    assert tally["score"] == pytest.approx(0.9661016949)
    counts = ("agreement", "optimal", "messages", "proposals", "rejections", "turns")
    assert [tally[name] for name in counts] == [1.0, 0.0, 3.0, 1.0, 0.0, 6.0]


def test_an_invalid_entry_of_a_recorded_game_is_named() -> None:
    """eval.py scores people's games before it plays any."""
    path = human_games("mediation")
    record = json.loads(path.read_text().splitlines()[0])
    game = load_config(None, ["model.path=x", "game.name=mediation"]).game
    instance = KIT.read(path)[0]
    broken = {**record, "action_log": [{"vroom": 7}]}
    with pytest.raises(ValueError, match=r"recorded game 1 \(from 0\): log entry 0 is not a move"):
        evaluate_people([record, broken], [instance, instance], game)


def test_a_start_needs_recorded_games(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a \.jsonl file"):
        KIT.read_recorded(tmp_path / "games.parquet")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl line 1: a recorded game has no player_data"):
        KIT.read_recorded(tmp_path / "bad.jsonl")
