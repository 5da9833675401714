"""Starts games in the middle of recorded human games.

Only `RecordedGame.begun` turns a start (dialop/starts.py) into an instance, whose opening holds
just those entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.kit import Entries
from dialop.matching.board import Action, MatchingInstance
from dialop.matching.recorded import begun, instance_from_record, moves_from_record
from dialop.rows import read_rows
from dialop.starts import start_length


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
        num = start_length(self.num_words, self.num_words_in_all, entries, uniform=uniform)
        if num == 0:
            return self.board
        return begun(self.record, num, key=f"{self.board.key}+{num}")


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
