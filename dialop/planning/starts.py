"""Starts games in the middle of recorded human games. A start never includes the end of a game."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialop.kit import Entries
from dialop.planning.board import PlanningInstance
from dialop.planning.recorded import begun, instance_from_record, moves_from_record
from dialop.planning.score import sheet_of
from dialop.rows import read_rows
from dialop.starts import start_length


@dataclass(frozen=True, slots=True)
class RecordedGame:
    """A recorded game to start from.

    `board` is the instance without an opening. `num_words` counts the words of each log entry that
    a start may include.
    """

    board: PlanningInstance
    record: dict[str, Any]
    num_words: tuple[int, ...]
    num_words_in_all: int

    def begun(self, entries: Entries, *, uniform: float) -> PlanningInstance:
        """The instance that starts after `entries`. `uniform` in [0, 1) decides a random start.

        Its key is the board's key and the number of entries.
        """
        num = start_length(self.num_words, self.num_words_in_all, entries, uniform=uniform)
        if num == 0:
            return self.board
        return begun(self.record, num, key=f"{self.board.key}+{num}")


def read_recorded(path: Path) -> list[RecordedGame]:
    """The games of a .jsonl file of recorded games.

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
        moves = moves_from_record(record)
        words = tuple(len(m.text.split()) if m.kind == "message" else 0 for m in moves)
        kinds = [move.kind for move in moves]
        longest = kinds.index("accept") if "accept" in kinds else len(kinds)
        games.append(RecordedGame(board, record, words[:longest], sum(words)))
    return games


def recorded_tally(record: Mapping[str, Any], instance: PlanningInstance) -> dict[str, float]:
    """The figures of people's recorded game, under this game's rules.

    Searches and errors were not recorded: people saw the whole city on a map.
    """
    moves = moves_from_record(record)
    plans = [move.plan for move in moves if move.plan is not None]
    accepted = bool(moves) and moves[-1].kind == "accept" and None not in plans[-1]
    score = 0.0
    if accepted:
        score = instance.norm(sheet_of(instance.sites, instance.preferences, plans[-1]).total)
    said = recorded_messages(record)
    return {
        "score": score,
        "agreement": float(accepted),
        "optimal": float(score > 1 - 1e-9),
        "messages": float(len(said)),
        "words": float(sum(len(text.split()) for text in said)),
        "proposals": float(len(plans)),
        "turns": float(len(moves)),
    }


def recorded_messages(record: Mapping[str, Any]) -> list[str]:
    """The texts of a recorded game's messages. Raises ValueError for an invalid log."""
    return [move.text for move in moves_from_record(record) if move.kind == "message"]
