"""Starts games in the middle of recorded human games.

A start is a number of log entries from the beginning of a record, where each message, proposal and
answer is one entry. It never includes the end of the game. Only `RecordedGame.begun` turns a start
into an instance, whose opening holds just these entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.matching.board import Action, MatchingInstance
from dialop.matching.recorded import begun, instance_from_record, moves_from_record
from dialop.rows import read_rows

Entries = int | float | str
RANDOM = "random"


@dataclass(frozen=True, slots=True)
class RecordedGame:
    """A recorded game to start from.

    `board` is the instance without an opening. `num_words` counts the words of each log entry that
    a start may include; it is empty if the log cannot be parsed.
    """

    board: MatchingInstance
    record: dict[str, Any]
    num_words: tuple[int, ...]
    num_words_in_all: int

    def begun(self, entries: Entries, *, uniform: float) -> MatchingInstance:
        """The instance that starts after `entries`. `uniform` in [0, 1) decides a random start.

        Its key is the board's key and the number of entries.
        """
        num = start_length(self, entries, uniform=uniform)
        if num == 0:
            return self.board
        return begun(self.record, num, key=f"{self.board.key}+{num}")


def checked_entries(value: object) -> Entries:
    """Check a start as given in the settings and return it.

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


def start_length(game: RecordedGame, entries: Entries, *, uniform: float) -> int:
    """The number of log entries in the start, never so many that the game is over.

    A number of entries is taken as it is, "random" draws every possible number with equal
    probability, and a share takes the most entries that hold at most that share of all words.
    """
    most = len(game.num_words)
    if entries == RANDOM:
        return min(most, int(uniform * (most + 1)))
    if isinstance(entries, int):
        return min(most, entries)
    assert isinstance(entries, float)
    room, num = entries * game.num_words_in_all, 0
    for words in game.num_words:
        room -= words
        if room < 0:
            break
        num += 1
    return num


def read_recorded(path: Path) -> list[RecordedGame]:
    """The games of a .jsonl file of recorded games.

    A game whose proposals cannot be parsed (another roster of names) has only the empty start.

    Raises:
        ValueError: for another file type or an invalid record; names the file and line.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"starts need recorded games, a .jsonl file, got {path}")
    games = []
    for index, (place, record) in enumerate(read_rows(path)):
        try:
            board = instance_from_record(record, key=f"{path.stem}/{index}")
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        moves = _parsed_moves(record)
        words = tuple(len(m.text.split()) if m.kind == "message" else 0 for m in moves)
        kinds = [move.kind for move in moves]
        longest = kinds.index("accept") if "accept" in kinds else len(kinds)
        games.append(RecordedGame(board, record, words[:longest], sum(words)))
    return games


def _parsed_moves(record: dict[str, Any]) -> list[Action]:
    """The log's moves, or an empty list if its proposals cannot be parsed with the roster."""
    try:
        return moves_from_record(record)
    except ValueError:
        return []
