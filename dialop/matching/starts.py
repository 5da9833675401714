"""Starts from what people said: how much of a recorded game is played before others play on.

A start is a number of log entries, the first ones; a message, a proposal and an answer are an entry
each. It never ends the game. Only `RecordedGame.begun` makes an instance of it, whose opening holds
these entries and no others.
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
    """A recorded game to start from: the board as it was before the first word, the record, and
    the words of each entry that a start may hold (none where the log cannot be read)."""

    board: MatchingInstance
    record: dict[str, Any]
    num_words: tuple[int, ...]
    num_words_in_all: int

    def begun(self, entries: Entries, *, uniform: float) -> MatchingInstance:
        """The game from where `entries` says, named after it; `uniform` in [0, 1) is the draw of
        random starts."""
        num = start_length(self, entries, uniform=uniform)
        if num == 0:
            return self.board
        return begun(self.record, num, key=f"{self.board.key}+{num}")


def checked_entries(value: object) -> Entries:
    """A start as settings give it: a number of entries (0: from the beginning), "random", or a
    share of the words between 0 and 1. Raises ValueError for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    share = isinstance(value, float) and math.isfinite(value) and 0 < value < 1
    if whole or share or value == RANDOM:
        assert isinstance(value, (int, float, str))
        return value
    raise ValueError(
        f"a start must be a number of entries, 'random', or a share of the words between 0 and 1, "
        f"got {value!r}"
    )


def start_length(game: RecordedGame, entries: Entries, *, uniform: float) -> int:
    """How many entries the start holds: as many as asked for, or as can be without ending the
    game; any number alike; or the most that hold no more than the share of the game's words."""
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
    """The games of a .jsonl of recorded games.

    A game whose proposals cannot be read (another roster of names) is started at its beginning.

    Raises:
        ValueError: for another file, or a record that is no game; names the file and line.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"starts need recorded games, a .jsonl file, got {path}")
    games = []
    for index, (place, record) in enumerate(read_rows(path)):
        try:
            board = instance_from_record(record, key=f"{path.stem}/{index}")
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        moves = _readable(record)
        words = tuple(len(m.text.split()) if m.kind == "message" else 0 for m in moves)
        kinds = [move.kind for move in moves]
        longest = kinds.index("accept") if "accept" in kinds else len(kinds)
        games.append(RecordedGame(board, record, words[:longest], sum(words)))
    return games


def _readable(record: dict[str, Any]) -> list[Action]:
    """The log's moves; none where its proposals cannot be read with the roster."""
    try:
        return moves_from_record(record)
    except ValueError:
        return []
