"""What a game gives the trainer: instances, games to play, scripted players, words of its own.

`kit_of` is the one place that knows which games there are; everything else asks it. Knows no
tokens and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dialop.game import Game, Script
from dialop.matching.starts import Entries
from selfplay.config import GameConfig
from selfplay.games import collab, matching


class Recorded(Protocol):
    """A game that people played. What it gives to play on holds their first moves and no others."""

    def begun(self, entries: Entries, *, uniform: float) -> Any:
        """An instance that starts where `entries` says; `uniform` in [0, 1) is the draw of random
        starts."""
        ...


class GameKit(Protocol):
    """One game's module of this folder. Instances are the game's own type; all have a `key`."""

    # Scripted players by name, and those that held-out games are compared with.
    SCRIPT_NAMES: tuple[str, ...]
    BASELINES: tuple[str, ...]
    # The only seat the policy can have, where the seats are unequal; None where it can have both.
    LEARNER_SEAT: int | None
    # Whether a .jsonl of its instances holds games that people played on them.
    PLAYED_BY_PEOPLE: bool

    def generate(
        self, game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
    ) -> list[Any]:
        """Instances start..start+num-1 of the stream that `seed` names.

        `easy`: any instance the rules allow, where the settings would keep only telling ones.
        """
        ...

    def read(self, path: Path, game: GameConfig) -> list[Any]:
        """The instances of a file. Raises ValueError that names the file and its row or line, or
        what the settings ask for and this machine lacks."""
        ...

    def read_recorded(self, path: Path) -> Sequence[Recorded]:
        """The games that people played in a file, in the order of `read`. Raises ValueError where
        the file or the game has none."""
        ...

    def new_game(self, instance: Any, game: GameConfig) -> Game:
        """A fresh game of an instance under the run's rules."""
        ...

    def make_script(self, spec: str, *, seed: int) -> Script:
        """A scripted player. Raises ValueError for an unknown one, with the valid ones."""
        ...

    def seated(self, spec: str) -> tuple[str, str]:
        """The specs of both seats when a scripted pair of this kind plays."""
        ...

    def described(self, instances: Sequence[Any], game: GameConfig) -> dict[str, Any]:
        """What a report says of the instances and rules it is about, as plain values."""
        ...

    def phrases(
        self, instances: Sequence[Any], game: GameConfig, *, split_lines: bool
    ) -> Sequence[str]:
        """What its texts repeat as units: a tokenizer of its own may give each one token.
        `split_lines` is `model.scratch.split_lines`."""
        ...


def kit_of(game: GameConfig) -> GameKit:
    """The kit of the game that the settings name."""
    match game.name:
        case "matching":
            return matching
        case "collab":
            return collab
    raise ValueError(f"game.name must be matching or collab, got {game.name!r}")
