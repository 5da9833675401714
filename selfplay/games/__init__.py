"""What a game gives the trainer: instances, playable games, scripted players, tokenizer phrases.

`kit_of` returns the `GameKit` of the game that the settings name. Games whose settings are keys of
`game` have a module here; all others declare themselves in their own module (dialop/kit.py) and
share `own.OwnKit`. The other rooms use games only through their kit. This room never sees tokens or
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from dialop.game import Game, Script
from dialop.kit import Played, Recorded, load_kit
from selfplay.config import GameConfig
from selfplay.games import collab, matching
from selfplay.games.own import OwnKit


class GameKit(Protocol):
    """The interface of a game's module. Instances have the game's own type, with a unique `key`."""

    ROLES: tuple[str, ...]  # the role of each seat
    POLICY_SEATS: tuple[int, ...]  # the seats that the policy can have
    SCRIPT_NAMES: tuple[str, ...]  # scripted players
    BASELINES: tuple[str, ...]  # scripted players that evaluations compare the policy with
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

    def recorded_tally(self, record: Mapping[str, Any], instance: Any) -> dict[str, float]:
        """The figures of one recorded game, as sums for means over games: `score` (required) and
        any measures. `errors` and `honesty` are left out where they were not recorded."""
        ...

    def recorded_messages(self, record: Mapping[str, Any]) -> list[str]:
        """The texts of one recorded game's messages. Raises ValueError for an invalid record."""
        ...

    def read_people(self, path: Path) -> Sequence[Played]:
        """The recorded human games of a file as games to imitate; those that cannot be read with
        the game's names are left out.

        Raises:
            ValueError: if the file contains none, or the game has no recordings.
        """
        ...

    def digest(self, instance: Any) -> str:
        """A name of what the instance's players see, whatever file it came from."""
        ...

    def new_game(self, instance: Any, game: GameConfig) -> Game:
        """A game at its start, with the rules of the settings."""
        ...

    def make_script(self, spec: str, *, seed: int) -> Script:
        """A scripted player. Raises ValueError for an unknown spec, with the valid ones."""
        ...

    def seated(self, spec: str) -> tuple[str, ...]:
        """The specs of all seats if scripted players fill them and one has this spec.

        A seat that the spec cannot play has another one.
        """
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
    return _own_kit(game.name)


@lru_cache(maxsize=16)
def _own_kit(name: str) -> OwnKit:
    return OwnKit(load_kit(name))
