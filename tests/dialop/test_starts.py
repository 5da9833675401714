"""Games that start within recorded ones: length, next mover, no leak of later moves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.kit import read as read_instances
from dialop.matching.roster import PAPERS, REVIEWERS
from dialop.rows import read_records
from dialop.starts import Entries, RecordedGame, checked_entries, message_of
from dialop.tags import MAX_MOVE
from tests.helpers.dialop_boards import BRIEF, FULL, RECORD, human_games, write_records
from tests.helpers.recorded_games import begun

read_recorded = load_kit("matching").read_recorded
OTHER_ROSTER = 16  # line 17 of the file names other reviewers


def the_game(tmp_path: Path, record: dict[str, Any] = RECORD) -> RecordedGame:
    (game,) = read_recorded(write_records(tmp_path / "one.jsonl", record))
    return game


# --- length -------------------------------------------------------------------------------------


def test_a_start_is_a_number_a_draw_or_a_share() -> None:
    assert [checked_entries(value) for value in (0, 3, "random", 0.5)] == [0, 3, "random", 0.5]
    for bad in (-1, 1.0, 0.0, True, "half", None, float("nan")):
        with pytest.raises(ValueError, match="a start must be a number of entries"):
            checked_entries(bad)


def test_lengths_by_hand(tmp_path: Path) -> None:
    """A start has at most six entries: the seventh ends the game. 3 of 9 words are a third."""
    game = the_game(tmp_path)

    def length(entries: Entries, *, uniform: float) -> int:
        return len(game.start_after(entries, uniform=uniform).opening)

    assert [length(k, uniform=0.0) for k in (0, 1, 6, 7, 99)] == [0, 1, 6, 6, 6]
    shares = {0.3: 0, 0.34: 1, 0.77: 1, 0.78: 5, 0.99: 5}
    assert {s: length(s, uniform=0.0) for s in shares} == shares
    drawn = [length("random", uniform=(n + 0.5) / 70) for n in range(70)]
    assert [drawn.count(k) for k in range(7)] == [10] * 7


def test_each_start_has_the_right_speaker_and_the_same_prompt_as_the_game_itself(
    tmp_path: Path,
) -> None:
    game = the_game(tmp_path)
    movers = []
    for k in range(7):
        instance = game.start_after(k, uniform=0.0)
        assert instance.key == ("one/0" if k == 0 else f"one/0+{k}")
        started = MatchingGame(instance, FULL)
        movers.append(started.seat_to_move)
        assert len(started.view(0).log) == k and not started.outcome().over
    # Seat 0 must answer the second proposal, also after a message from its proposer.
    assert movers == [1, 0, 1, 1, 1, 0, 0]
    started = MatchingGame(game.start_after(6, uniform=0.0), BRIEF)
    assert started.step(0, "[accept]").action == "accept"
    assert started.outcome().score == 12


# --- leaks --------------------------------------------------------------------------------------


def prompts(instance: MatchingInstance, options: Rules) -> list[str]:
    """Everything the two seats read before the first move."""
    game = MatchingGame(instance, options)
    return ["\n".join((game.prompt(seat).system, game.prompt(seat).user)) for seat in (0, 1)]


def another_end(record: dict[str, Any], num: int) -> dict[str, Any]:
    """The record with other texts in all entries from `num` on, of the same kinds and seats."""
    size, log = len(record["table"]), list(record["action_log"][:num])
    crossed = [[reviewer, size - 1 - reviewer] for reviewer in range(size)]
    lines = [f"{PAPERS[paper]}: {REVIEWERS[reviewer]}" for reviewer, paper in crossed]
    others = {
        "message": {"message": {"data": "QUITE OTHER WORDS"}},
        "proposal": {"proposal": "\n".join(["Proposal:", *lines]), "proposal_ids": crossed},
    }
    log += [entry | others.get(entry["type"], {}) for entry in record["action_log"][num:]]
    return {**record, "action_log": log, "proposal_reward": 0, "result": {"score": 0}}


def other_cells(instance: MatchingInstance, seat: int) -> MatchingInstance:
    """The board with every value that the seat does not see changed."""
    rows = zip(instance.table, instance.masks[seat], strict=True)
    table = tuple(
        tuple(v if seen else (v + 13) % 100 for v, seen in zip(*row, strict=True)) for row in rows
    )
    return replace(instance, table=table, best=1, solo=(0.0, 0.0))


def check_nothing_later_is_told(record: dict[str, Any], options: Rules) -> int:
    """Check every start of a record. Returns the number of prompts checked."""
    log, num_checked = record["action_log"], 0
    longest = next((i for i, e in enumerate(log) if e.get("response", {}).get("accept")), len(log))
    for num in range(longest + 1):
        instance = begun("matching", record, num)
        texts = prompts(instance, options)
        assert texts == prompts(begun("matching", another_end(record, num), num), options)
        earlier = " ".join(str(e["message"]["data"]) for e in log[:num] if e["type"] == "message")
        for entry in log[num:]:
            words = str(entry["message"]["data"]) if entry["type"] == "message" else ""
            if len(words) > 15 and words not in earlier:
                assert all(words not in text for text in texts)
        for seat in (0, 1):
            assert prompts(other_cells(instance, seat), options)[seat] == texts[seat]
        num_checked += 2
    return num_checked


def test_nothing_that_came_later_is_told_in_a_record_by_hand() -> None:
    assert check_nothing_later_is_told(RECORD, FULL) == 14
    assert check_nothing_later_is_told(RECORD, BRIEF) == 14


@pytest.mark.slow
def test_nothing_that_came_later_is_told_in_any_recorded_game() -> None:
    records = [r for i, r in enumerate(read_records(human_games())) if i != OTHER_ROSTER]
    num_checked = sum(check_nothing_later_is_told(record, FULL) for record in records)
    num_entries = sum(len(record["action_log"]) for record in records)
    assert num_checked == 2 * num_entries, "every start before the last entry, for both seats"


def test_a_log_of_another_roster_is_started_at_its_beginning() -> None:
    games = read_recorded(human_games())
    boards = read_instances(human_games())
    assert [game.board for game in games] == boards
    assert games[OTHER_ROSTER].start_after(3, uniform=0.0) == boards[OTHER_ROSTER]
    for index, game in enumerate(games):
        if index != OTHER_ROSTER:
            moves = game.moves
            assert moves[-1].kind == "accept" and game.longest == len(moves) - 1
            last = MatchingGame(game.start_after(10**6, uniform=0.0), FULL)
            assert last.seat_to_move == moves[-1].seat and last.answer_due


def test_a_recorded_message_is_bounded() -> None:
    entry = {"type": "message", "message": {"data": "\n" * MAX_MOVE}}
    assert len(message_of(entry)) == MAX_MOVE
    entry["message"] = {"data": "\n" * (MAX_MOVE + 1)}
    with pytest.raises(ValueError, match=r"message\.data must have at most 20000 "):
        message_of(entry)
