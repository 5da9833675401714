"""What a game gives the trainer: instances, playable games, scripted players, tokenizer phrases.

One module per game implements `GameKit`; `kit_of` returns the one that the settings name. The other
rooms use games only through their kit. This room never sees tokens or torch.
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
    """A recorded human game that can be continued from any of its moves."""

    def begun(self, entries: Entries, *, uniform: float) -> Any:
        """An instance whose first moves are those of the recording, up to `entries`.

        `uniform` in [0, 1) is the random number that selects a start if `entries` is "random".
        """
        ...


class GameKit(Protocol):
    """The interface of a game's module. Instances have the game's own type, with a unique `key`."""

    SCRIPT_NAMES: tuple[str, ...]  # scripted players
    BASELINES: tuple[str, ...]  # scripted players that evaluations compare the policy with
    LEARNER_SEAT: int | None  # the only seat that the policy can play; None if it can play both
    PLAYED_BY_PEOPLE: bool  # whether a .jsonl of instances contains recorded human games

    def generate(
        self, game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
    ) -> list[Any]:
        """Instances start..start+num-1 of the stream that `seed` selects.

        `easy` keeps every instance that the rules allow and ignores `game.keep`.
        """
        ...

    def read(self, path: Path, game: GameConfig) -> list[Any]:
        """The instances of a file.

        Raises:
            ValueError: for an invalid row, with the file and its row or line, or for a setting that
                this machine cannot satisfy.
        """
        ...

    def read_recorded(self, path: Path) -> Sequence[Recorded]:
        """The recorded human games of a file, in the order of `read`.

        Raises:
            ValueError: if the file contains none, or the game has no recordings.
        """
        ...

    def new_game(self, instance: Any, game: GameConfig) -> Game:
        """A game at its start, with the rules of the settings."""
        ...

    def make_script(self, spec: str, *, seed: int) -> Script:
        """A scripted player. Raises ValueError for an unknown spec, with the valid ones."""
        ...

    def seated(self, spec: str) -> tuple[str, str]:
        """The specs of both seats if a pair of scripted players plays and one has this spec."""
        ...

    def described(self, instances: Sequence[Any], game: GameConfig) -> dict[str, Any]:
        """Facts about the instances and rules for an evaluation report, as plain values."""
        ...

    def phrases(
        self, instances: Sequence[Any], game: GameConfig, *, split_lines: bool
    ) -> Sequence[str]:
        """Phrases that the game's texts repeat; a scratch model's tokenizer makes each one token.

        `split_lines` is `model.scratch.split_lines`.
        """
        ...


def kit_of(game: GameConfig) -> GameKit:
    """The kit of the game `game.name`."""
    match game.name:
        case "matching":
            return matching
        case "collab":
            return collab
    raise ValueError(f"game.name must be matching or collab, got {game.name!r}")
