"""What mediation gives the trainer: options, starts from recorded games, phrases, variations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dialop_boards import human_games
from mediation_games import BRIEF, SMALL

from dialop.kit import load_kit
from dialop.mediation.game import MediationGame
from dialop.mediation.kit import Options, vary
from dialop.mediation.records import AGENT

KIT = load_kit("mediation")


def test_the_kit_declares_three_seats_of_two_roles() -> None:
    assert KIT.ROLES == ("user", "user", "agent") and KIT.POLICY_SEATS == (0, 1, 2)
    assert KIT.seated("honest") == ("honest",) * 3 and KIT.PLAYED_BY_PEOPLE
    options = Options(keep_flights=2, events=2, brief=True, messages=False)
    instances = KIT.generate(options, seed=1, start=3, num=4)
    assert [i.key for i in instances] == ["1/3", "1/4", "1/5", "1/6"]
    game = KIT.new_game(instances[0], options)
    assert game.seat_to_move == AGENT and game.prompt(AGENT).system == ""
    assert KIT.restore(game.state()).state() == game.state()
    facts = KIT.described(instances, options)
    assert facts == {"flights_of_a_user": 2, "events_of_a_user": 2, "messages_allowed": False}


def test_what_varies_is_seen_by_one_user_alone() -> None:
    for options in (Options(), Options(brief=True)):
        for seat in (0, 1):
            twin = vary(SMALL, seat, seed=3)
            assert twin is not None and twin.users[1 - seat] == SMALL.users[1 - seat]
            games = [KIT.new_game(instance, options) for instance in (SMALL, twin)]
            for other in range(3):
                same = games[0].prompt(other) == games[1].prompt(other)
                assert same == (other != seat)
    assert vary(SMALL, AGENT, seed=0) is None


def test_phrases_are_found_in_the_texts_of_the_brief_style() -> None:
    options = Options(keep_flights=3, events=2, brief=True)
    instances = KIT.generate(options, seed=0, start=0, num=20)
    phrases = KIT.phrases(instances, options, split_lines=False)
    assert len(set(phrases)) == len(phrases)
    texts = []
    for instance in instances:
        game = KIT.new_game(instance, options)
        player = KIT.make_script("honest:probe=1", seed=0)
        while (seat := game.seat_to_move) is not None:
            text = player.act(game.view(seat))
            texts += [text, *game.step(seat, text).observations]
        texts += [game.prompt(each).user for each in range(3)]
    whole = "\n".join(texts)
    # Some costs did not occur; the scripted agent asks nobody who has told, and restores nothing.
    rare = (" -", "0: [message]", "1: [message]", "Agent:", "You:")
    assert [p for p in phrases if p not in whole and not p.startswith(rare)] == []
    assert KIT.phrases(instances, replace(options, brief=False), split_lines=False) == []


def test_starts_hold_only_what_came_before() -> None:
    games = KIT.read_recorded(human_games("mediation"))
    assert len(games) == 81
    for game in games[:20]:
        moves = game.moves  # type: ignore[attr-defined]
        for entries, num in ((0, 0), (2, 2), (999, len(moves) - 1)):
            begun = game.begun(entries, uniform=0.0)
            assert begun.opening == moves[:num]
            assert begun.key.endswith(f"+{num}") == (num > 0)
            assert MediationGame(begun, BRIEF).seat_to_move is not None
    assert games[0].begun(0.99, uniform=0.0).opening == games[0].moves[:2]  # type: ignore[attr-defined]


def test_people_are_tallied() -> None:
    path = human_games("mediation")
    record = json.loads(path.read_text().splitlines()[0])
    instance = KIT.read(path)[0]
    tally = KIT.recorded_tally(record, instance)
    assert tally["score"] == pytest.approx(0.9661016949)
    counts = ("agreement", "optimal", "messages", "proposals", "rejections", "turns")
    assert [tally[name] for name in counts] == [1.0, 0.0, 3.0, 1.0, 0.0, 6.0]
    assert KIT.recorded_messages(record)[0].startswith("Hello! Can you book me")


def test_a_start_needs_recorded_games(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a \.jsonl file"):
        KIT.read_recorded(tmp_path / "games.parquet")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl line 1: a recorded game has no player_data"):
        KIT.read_recorded(tmp_path / "bad.jsonl")
