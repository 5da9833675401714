"""What a game gives the trainer: instances, playable games, scripted players, tokenizer phrases.

`kit_of` returns the `GameKit` of the game that the settings name. A game declares itself in its own
module (dialop/kit.py); a `GameKit` hands it the settings as its own options. The other rooms use
games only through their kit. This room never sees tokens or torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dialop.game import Game, Script
from dialop.kit import Kit, Played, Recorded, load_kit
from selfplay.config import GameConfig


class GameKit:
    """A game for the trainer. Instances have the game's own type, with a unique `key`.

    `ROLES` holds the role of each seat, `POLICY_SEATS` the seats that the policy can have,
    `BASELINES` the scripted players that evaluations compare the policy with. `PLAYED_BY_PEOPLE`
    says whether a .jsonl of instances contains recorded human games. Where a game lacks recordings
    what reads them raises ValueError.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.ROLES, self.POLICY_SEATS = kit.ROLES, kit.POLICY_SEATS
        self.SCRIPT_NAMES, self.BASELINES = kit.SCRIPT_NAMES, kit.BASELINES
        self.PLAYED_BY_PEOPLE = kit.PLAYED_BY_PEOPLE

    def generate(
        self, game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
    ) -> list[Any]:
        """Instances start..start+num-1 of the stream that `seed` selects.

        `easy` keeps every instance that the rules allow, hard or not.
        """
        options = self._kit.easy(game.rules()) if easy else game.rules()
        return self._kit.generate(options, seed=seed, start=start, num=num, processes=processes)

    def read(self, path: Path, game: GameConfig) -> list[Any]:
        """The instances of a file. Prints what the game says of how they are played here.

        Raises:
            ValueError: for an invalid row, with the file and its row or line, or for a setting that
                this machine cannot satisfy.
        """
        instances = self._kit.read(path)
        note = self._kit.check_machine(instances, game.rules())
        if note:
            print(f"{path}: {note}", file=sys.stderr, flush=True)
        return instances

    def read_recorded(self, path: Path) -> Sequence[Recorded]:
        """The recorded human games of a file, in the order of `read`."""
        return self._kit.read_recorded(path)

    def read_people(self, path: Path) -> Sequence[Played]:
        """The recorded human games of a file as games to imitate; those that cannot be read with
        the game's names are left out."""
        return self._kit.read_people(path)

    def recorded_tally(self, record: Mapping[str, Any], instance: Any) -> dict[str, float]:
        """The figures of one recorded game, as sums for means over games: `score` (required) and
        any measures. `errors` and `honesty` are left out where they were not recorded."""
        return self._kit.recorded_tally(record, instance)

    def recorded_messages(self, record: Mapping[str, Any]) -> list[str]:
        """The texts of one recorded game's messages. Raises ValueError for an invalid record."""
        return self._kit.recorded_messages(record)

    def digest(self, instance: Any) -> str:
        """A name of what the instance's players see, whatever file it came from."""
        return self._kit.digest(instance)

    def new_game(self, instance: Any, game: GameConfig) -> Game:
        """A game at its start, with the rules of the settings."""
        return self._kit.new_game(instance, game.rules())

    def make_script(self, spec: str, *, seed: int) -> Script:
        """A scripted player. Raises ValueError for an unknown spec, with the valid ones."""
        return self._kit.make_script(spec, seed=seed)

    def seated(self, spec: str) -> tuple[str, ...]:
        """The specs of all seats if scripted players fill them and one has this spec.

        A seat that the spec cannot play has another one.
        """
        return self._kit.seated(spec)

    def described(self, instances: Sequence[Any], game: GameConfig) -> dict[str, Any]:
        """Facts about the instances and rules for an evaluation report, as plain values."""
        return self._kit.described(instances, game.rules())

    def phrases(
        self, instances: Sequence[Any], game: GameConfig, *, split_lines: bool
    ) -> Sequence[str]:
        """Phrases that the game's texts repeat; a scratch model's tokenizer makes each one token.

        `split_lines` is `model.scratch.split_lines`.
        """
        return self._kit.phrases(instances, game.rules(), split_lines=split_lines)


def kit_of(game: GameConfig) -> GameKit:
    """The kit of the game `game.name`."""
    return _kit_of(game.name)


@lru_cache(maxsize=16)
def _kit_of(name: str) -> GameKit:
    return GameKit(load_kit(name))
