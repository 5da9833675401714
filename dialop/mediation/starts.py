"""Starts games of mediation in the middle of recorded human games."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dialop.kit import Entries
from dialop.mediation.recorded import instance_from_record, moves_from_record
from dialop.mediation.records import Act, MediationInstance
from dialop.rows import read_rows
from dialop.starts import start_length


@dataclass(frozen=True, slots=True)
class RecordedGame:
    """A recorded game to start from: its instance without an opening, and its moves."""

    instance: MediationInstance
    moves: tuple[Act, ...]

    def begun(self, entries: Entries, *, uniform: float) -> MediationInstance:
        """The instance that starts after `entries`. `uniform` in [0, 1) decides a random start.

        It holds nothing of the later entries. Its key is the instance's key and the number of
        entries. The game's last entry, the answer that ends it, is never included.
        """
        words = [len(act.text.split()) if act.kind == "message" else 0 for act in self.moves]
        num = start_length(words[:-1], sum(words), entries, uniform=uniform)
        if num == 0:
            return self.instance
        key = f"{self.instance.key}+{num}"
        return replace(self.instance, key=key, opening=self.moves[:num])


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
            instance = instance_from_record(record, key=f"{path.stem}/{index}")
            moves = moves_from_record(record, instance)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        games.append(RecordedGame(instance, tuple(moves)))
    return games
