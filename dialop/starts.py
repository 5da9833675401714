"""Starts games from recorded human games by replaying the beginning of a record. A start is a
number of log entries, where each message, proposal and answer is one entry. It never includes the
end of the game.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, TypeVar

from dialop.game import PlayerError
from dialop.rows import read_rows
from dialop.tags import MAX_MOVE
from dialop.values import checked_bool, checked_list, checked_string, field

RANDOM = "random"
Entries = int | float | str  # how much of a recorded game is replayed before play starts
Records = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedGame:
    """A recorded game to start from: its instance without an opening, and its moves.

    A start has at most the first `longest` moves. `moves` is empty if the log cannot be parsed.
    """

    board: Any
    moves: tuple[Any, ...]
    longest: int

    def start_after(self, entries: Entries, *, uniform: float) -> Any:
        """The instance that starts after `entries`. `uniform` in [0, 1) selects a random start.

        It contains no later entries, so players cannot know how the recorded game ended. Its key is
        the board's key and the number of entries.
        """
        words = [len(move.text.split()) if move.kind == "message" else 0 for move in self.moves]
        num = start_length(words[: self.longest], sum(words), entries, uniform=uniform)
        if num == 0:
            return self.board
        key = f"{self.board.key}+{num}"
        return replace(self.board, key=key, opening=self.moves[:num])


class OtherRoster(ValueError):
    """A recorded game uses names that this game does not have."""


def read_recorded(
    path: Path,
    instance_of: Callable[..., Any],
    moves_of: Callable[[Records, Any], Sequence[Any]],
    longest: Callable[[Sequence[Any]], int],
) -> list[RecordedGame]:
    """The games of a .jsonl file of recorded games.

    `instance_of(record, key=)` and `moves_of(record, instance)` read one record; `longest` gives
    the number of moves before the end. A game with another roster has no moves, so only the empty
    start.

    Raises:
        ValueError: for another file type or an invalid record; names the file and line.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"starts need recorded games, a .jsonl file, got {path}")
    games = []
    for index, (location, record) in enumerate(read_rows(path)):
        try:
            board, moves = instance_of(record, key=f"{path.stem}/{index}"), ()
            with suppress(OtherRoster):
                moves = tuple(moves_of(record, board))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        games.append(RecordedGame(board, moves, longest(moves)))
    return games


def read_log(log: Any, read: Callable[[Any], T]) -> list[T]:
    """The entries of a record's `action_log` as moves. Raises ValueError for an entry that `read`
    rejects; gives its number (from 0)."""
    moves = []
    for number, entry in enumerate(checked_list(log, "action_log")):
        try:
            moves.append(read(entry))
        except PlayerError as error:
            raise OtherRoster(f"log entry {number} does not fit the roster: {error}") from error
        except ValueError as error:
            raise ValueError(f"log entry {number} is not a move: {error}") from None
    return moves


def message_of(entry: Any) -> str:
    """The text of a log entry of the type "message"."""
    text = field(field(entry, "message"), "data", "message")
    if len(checked_string(text, "message.data")) > MAX_MOVE:
        rule = f"message.data must have at most {MAX_MOVE} characters"
        raise ValueError(f"{rule}, got {len(text)}")
    return str(text)


def answer_of(entry: Any) -> Literal["accept", "reject"]:
    """The answer of a log entry, which must be of the type "proposal_response"."""
    if (kind := field(entry, "type")) != "proposal_response":
        raise ValueError(f"type must be message, proposal or proposal_response, got {short(kind)}")
    accepts = field(field(entry, "response"), "accept", "response")
    return "accept" if checked_bool(accepts, "response.accept") else "reject"


@dataclass(frozen=True, slots=True)
class Rescored:
    """A rescored game: its numbers by name, the recorded numbers, and a line for each other
    difference."""

    numbers: dict[str, float]
    recorded: dict[str, Any]
    differences: Sequence[str] = ()


def place(instance: Any, score: float) -> dict[str, float]:
    """A score with the best and worst scores of its instance, and its normalized value."""
    best, worst = instance.best, instance.worst
    return {"score": score, "best": best, "worst": worst, "norm": instance.norm(score)}


def replay(rescore: Callable[..., Rescored], record: Records, *, index: int) -> dict[str, Any]:
    """The result of one recorded game: its `index`, its numbers, the `recorded` ones, the
    `differences`, and whether it `agrees`. "error" says why a game cannot be scored."""
    try:
        found = rescore(record, key=f"recorded/{index}")
    except ValueError as error:
        return {"index": index, "agrees": False, "error": str(error)}
    differences = [
        f"{name} is {found.numbers[name]}, the recording says {said}"
        for name, said in found.recorded.items()
        if not isinstance(said, int | float) or abs(said - found.numbers[name]) > 1e-9
    ]
    differences += found.differences
    more = {"recorded": found.recorded, "differences": differences, "agrees": not differences}
    return {"index": index, **found.numbers, **more}


def before_accept(moves: Sequence[Any]) -> int:
    """The number of moves before the first acceptance."""
    return next((n for n, move in enumerate(moves) if move.kind == "accept"), len(moves))


def tally(moves: Sequence[Any], score: float | None) -> dict[str, float]:
    """The measures of every recorded game. `score` is normalized, None without an agreement."""
    kinds = [move.kind for move in moves]
    return {
        "score": score or 0.0,
        "agreement": float(score is not None),
        "optimal": float((score or 0.0) > 1 - 1e-9),
        "messages": float(kinds.count("message")),
        "words": float(sum(len(move.text.split()) for move in moves if move.kind == "message")),
        "proposals": float(kinds.count("propose")),
        "turns": float(len(moves)),
    }


def checked_entries(value: object) -> Entries:
    """A start from the settings, checked.

    Valid are a number of entries (0: from the beginning), "random", or a share of the words between
    0 and 1. Raises ValueError for anything else.
    """
    count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    share = isinstance(value, float) and math.isfinite(value) and 0 < value < 1
    if count or share or value == RANDOM:
        assert isinstance(value, (int, float, str))
        return value
    raise ValueError(
        f"a start must be a number of entries, 'random', or a share of the words between 0 and 1, "
        f"got {value!r}"
    )


def start_length(
    num_words: Sequence[int], num_words_in_all: int, entries: Entries, *, uniform: float
) -> int:
    """The number of log entries in the start, never enough to end the game.

    `num_words` counts the words of each entry that a start may include, `num_words_in_all` the
    words of the whole game. A number of entries is used unchanged, "random" draws every possible
    number with equal probability, and a share takes the most entries with at most that share of all
    words.
    """
    most = len(num_words)
    if entries == RANDOM:
        return min(most, int(uniform * (most + 1)))
    if isinstance(entries, int):
        return min(most, entries)
    assert isinstance(entries, float)
    return bisect_right([*accumulate(num_words)], entries * num_words_in_all)
