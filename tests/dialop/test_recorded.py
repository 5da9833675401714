"""Recorded human games: rescored from their text, played on from a cut, read as instances."""

from itertools import pairwise
from typing import Any

import pytest

from dialop.kit import load_kit
from dialop.matching.board import best_pairs
from dialop.matching.game import MatchingGame
from dialop.matching.proposal import render_proposal
from dialop.matching.recorded import instance_from_record, moves_from_record
from dialop.matching.roster import PAPERS, REVIEWERS
from dialop.rows import read_records
from tests.helpers.dialop_boards import FULL, human_games, play
from tests.helpers.recorded_games import begun

replay = load_kit("matching").replay
OTHER_ROSTER = 16  # line 17 of the file


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return list(read_records(human_games()))


def test_66_of_67_games_agree_and_the_other_names_its_roster(records: list[dict[str, Any]]) -> None:
    lines = [replay(record, index=i) for i, record in enumerate(records)]
    assert [line["index"] for line in lines if not line["agrees"]] == [OTHER_ROSTER]
    assert sum(line["agrees"] for line in lines) == 66
    other = lines[OTHER_ROSTER]
    assert "does not fit the roster" in other["error"] and "Alexander Hill" in other["error"]
    assert not any("error" in line for line in lines if line["agrees"])
    assert lines[0] == {
        "index": 0, "score": 599, "best": 599, "norm": 1.0,
        "recorded": {"score": 599, "best": 599}, "differences": [], "agrees": True,
    }  # fmt: skip
    assert sum(line["norm"] for line in lines if line["agrees"]) / 66 == pytest.approx(
        0.92, abs=0.02
    )


def test_the_first_recorded_board_scores_as_specified(records: list[dict[str, Any]]) -> None:
    instance = instance_from_record(records[0], key="first")
    assert instance.table[0] == (37, 34, 50, 50, 50, 13, 20, 28)
    best = best_pairs(instance.table)
    straight = tuple((i, i) for i in range(8))
    reverse = tuple((7 - i, i) for i in range(8))
    for pairs, score in ((best, 599), (straight, 433), (reverse, 451)):
        for text in _spellings(pairs):
            game = MatchingGame(instance, FULL)
            play(game, (instance.first_seat, text), (1 - instance.first_seat, "[accept]"))
            assert game.outcome().score == score
            assert game.outcome().score_norm == pytest.approx(score / 599)


def _spellings(pairs: tuple[tuple[int, int], ...]) -> list[str]:
    """Spellings of one matching that the released environment scored in four different ways."""
    short = render_proposal(tuple(sorted(pairs)), REVIEWERS, papers=PAPERS).splitlines()[1:]
    full = [f"{PAPERS[paper]}: {REVIEWERS[reviewer]}" for reviewer, paper in pairs]
    orders = short, sorted(short), short[::-1], full
    return ["[propose] Proposal:<br/>" + "<br/>".join(lines) for lines in orders]


def test_every_cut_of_every_game_has_the_right_speaker_and_proposal(
    records: list[dict[str, Any]],
) -> None:
    for index, record in enumerate(records[:20]):
        if index == OTHER_ROSTER:
            continue
        moves = moves_from_record(record, instance_from_record(record, key="all"))
        games = [MatchingGame(begun("matching", record, k), FULL) for k in range(len(moves) + 1)]
        assert games[0].seat_to_move == moves[0].seat
        pending = None
        for move, game in zip(moves, games[1:], strict=True):
            if move.kind == "propose":
                pending = move
            elif move.kind in ("accept", "reject"):
                pending = None
            assert game.view(0).pending == (pending.pairs if pending else None)
            if move.kind == "accept":
                assert game.seat_to_move is None
            elif pending is not None:
                assert game.seat_to_move == 1 - pending.seat
            elif move.kind == "reject":
                assert game.seat_to_move == move.seat
            else:
                assert game.seat_to_move == 1 - move.seat
        assert games[-1].outcome().score == record["proposal_reward"]
        for before, after in pairwise(games):
            assert len(after.view(0).log) == len(before.view(0).log) + 1


def test_damaged_records_say_what_is_wrong(records: list[dict[str, Any]]) -> None:
    good = records[0]
    without = {k: v for k, v in good.items() if k != "mask1"}
    assert replay(without, index=5)["error"] == "a recorded game needs the fields mask1"
    ragged = {**good, "table": good["table"][:7]}
    assert "table must be 7x7" in replay(ragged, index=5)["error"]
    unfinished = {**good, "action_log": good["action_log"][:-1]}
    assert replay(unfinished, index=5)["error"].startswith("no accepted proposal")
    assert "log entry 0 " in replay({**good, "action_log": [{"player": 0}]}, index=5)["error"]
    changed = {**good, "proposal_reward": 1}
    found = replay(changed, index=5)
    assert not found["agrees"] and found["differences"] == ["score is 599, the recording says 1"]
