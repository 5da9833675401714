"""Recorded human games of mediation: every number recomputed, every cut played on."""

import copy
import json
from typing import Any

import pytest

from dialop.kit import load_kit
from dialop.mediation.game import MediationGame
from dialop.mediation.recorded import instance_from_record, moves_from_record
from dialop.mediation.records import Act
from dialop.rows import read_records
from tests.helpers.dialop_boards import human_games
from tests.helpers.mediation_games import BRIEF, FULL
from tests.helpers.recorded_games import begun

replay = load_kit("mediation").replay


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return list(read_records(human_games("mediation")))


def test_all_games_agree_in_every_number(records: list[dict[str, Any]]) -> None:
    lines = [replay(record, index=i) for i, record in enumerate(records)]
    assert len(lines) == 81 and all(line["agrees"] for line in lines)
    for line, record in zip(lines, records, strict=True):
        assert line["score"] == record["result"]["score"] == record["scores"]["reward"]
        assert (line["best"], line["worst"]) == (
            record["result"]["best"],
            record["result"]["worst"],
        )
        assert line["norm"] == pytest.approx(record["result"]["norm"])
        assert line["differences"] == [] and "error" not in line
    mean = sum(line["norm"] for line in lines) / 81
    assert mean == pytest.approx(0.970, abs=0.012)  # the published 162 games; these are half


def test_a_changed_number_is_found_and_named(records: list[dict[str, Any]]) -> None:
    for path, words in (
        (("scores", "reward"), "score is"),
        (("result", "best"), "best is"),
        (("result", "worst"), "worst is"),
        (("result", "norm"), "norm is"),
    ):
        record = copy.deepcopy(records[0])
        record[path[0]][path[1]] += 1
        line = replay(record, index=0)
        assert not line["agrees"] and line["differences"][0].startswith(words)
    record = copy.deepcopy(records[0])
    proposal = next(e for e in record["action_log"] if e["type"] == "proposal")
    proposal["proposals"][1]["cost"]["price"] -= 1
    line = replay(record, index=0)
    assert not line["agrees"]
    assert all("user 1: calendar, price, arrival_time, total" in d for d in line["differences"])


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_cut_of_every_game_plays_on(every: int, records: list[dict[str, Any]]) -> None:
    """A standing proposal waits for the users without an answer; the end has the recorded score."""
    for number, record in enumerate(records[::every]):
        moves = moves_from_record(record, instance_from_record(record, key="all"))
        options = (FULL, BRIEF)[number % 2]
        for k in range(len(moves) + 1):
            game = MediationGame(begun("mediation", record, k), options)
            seat, owed = game.seat_to_move, owing(moves[:k])
            assert game.answer_due == bool(owed) and (not owed or seat == owed[0])
            if k == len(moves):
                assert seat is None and game.outcome().score == record["result"]["score"]
            assert (seat is None) == (k == len(moves))
        assert game.prompt(0).user != game.prompt(1).user


def owing(moves: list[Act]) -> list[int]:
    """The users who owe an answer to the last proposal, none if it was dropped or booked."""
    proposals = [i for i, act in enumerate(moves) if act.kind == "propose"]
    if not proposals:
        return []
    given = {act.seat for act in moves[proposals[-1] :] if act.kind in ("accept", "reject")}
    return sorted({0, 1} - given)


def test_a_restored_game_tells_each_seat_its_own_room(records: list[dict[str, Any]]) -> None:
    record = records[0]
    game = MediationGame(begun("mediation", record, len(record["action_log"]) - 1), FULL)
    users = [game.prompt(seat).user for seat in range(3)]
    assert "\nYou: [message] Hello! Can you book me a flight on Thursday morning?" in users[0]
    assert "\nUser 0: [message] Hello! Can you book me" in users[2]
    assert "Thursday morning" not in users[1]
    assert "Your points: calendar -9, price 3, arrival 0, in all -6\n" in users[0]
    assert "Your points: calendar -7, price 14, arrival 0, in all 7\n" in users[1]
    assert "You: all: [propose] user 0: id 21, user 1: id 25\nFlight for user 0: id 21" in users[2]
    state = json.loads(json.dumps(game.state()))
    for twin in (game.clone(), MediationGame.from_state(state)):
        assert twin.seat_to_move == 1 and twin.step(1, "[accept]").error is None
        assert twin.outcome().score == 1.0


def test_damaged_records_say_what_is_wrong(records: list[dict[str, Any]]) -> None:
    def error(change: Any) -> str:
        record = copy.deepcopy(records[0])
        change(record)
        line = replay(record, index=0)
        assert line["agrees"] is False
        return str(line["error"])

    assert error(lambda r: r.pop("player_data")) == "a recorded game has no player_data"
    assert "log entry 0 is not a move" in error(lambda r: r["action_log"][0].update(vroom=1))
    assert "integer from 0 to 1" in error(lambda r: r["action_log"][0].update(vroom=2))
    assert "both users accepted" in error(lambda r: r["action_log"].pop())
    assert "user 1.mean_price" in error(lambda r: r["player_data"][1].update(mean_price=0))
    assert "a time like" in error(lambda r: r["player_data"][0]["flights"][0].update(start="noon"))
    assert "same arrival_time_pref" in error(
        lambda r: r["player_data"][0].update(arrival_time_pref=9)
    )
    assert "unshared" in error(lambda r: r["player_data"][0]["shared_calendar"].pop())
