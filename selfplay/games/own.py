"""The kit of any game whose module declares itself (dialop/kit.py): translates settings to options.

Such a game needs no module in this room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dialop.game import Game, Script
from dialop.kit import Kit, Played, Recorded
from selfplay.config import GameConfig


class OwnKit:
    """`GameKit` of a `dialop.kit.Kit`."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.ROLES, self.POLICY_SEATS = kit.ROLES, kit.POLICY_SEATS
        self.SCRIPT_NAMES, self.BASELINES = kit.SCRIPT_NAMES, kit.BASELINES
        self.PLAYED_BY_PEOPLE = kit.PLAYED_BY_PEOPLE

    def generate(
        self, game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
    ) -> list[Any]:
        """Instances drawn as the options say; `easy` is ignored."""
        return self._kit.generate(
            game.rules(), seed=seed, start=start, num=num, processes=processes
        )

    def read(self, path: Path, game: GameConfig) -> list[Any]:
        return self._kit.read(path)

    def read_recorded(self, path: Path) -> Sequence[Recorded]:
        return self._kit.read_recorded(path)

    def read_people(self, path: Path) -> Sequence[Played]:
        return self._kit.read_people(path)

    def digest(self, instance: Any) -> str:
        return self._kit.digest(instance)

    def recorded_tally(self, record: Mapping[str, Any], instance: Any) -> dict[str, float]:
        return self._kit.recorded_tally(record, instance)

    def recorded_messages(self, record: Mapping[str, Any]) -> list[str]:
        return self._kit.recorded_messages(record)

    def new_game(self, instance: Any, game: GameConfig) -> Game:
        return self._kit.new_game(instance, game.rules())

    def make_script(self, spec: str, *, seed: int) -> Script:
        return self._kit.make_script(spec, seed=seed)

    def seated(self, spec: str) -> tuple[str, ...]:
        return self._kit.seated(spec)

    def described(self, instances: Sequence[Any], game: GameConfig) -> dict[str, Any]:
        return self._kit.described(instances, game.rules())

    def phrases(
        self, instances: Sequence[Any], game: GameConfig, *, split_lines: bool
    ) -> Sequence[str]:
        return self._kit.phrases(instances, game.rules(), split_lines=split_lines)
