"""The settings in `rollout.options` of the built-in values of `rollout.play`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from selfplay.config import COMPARED_IN_GROUPS, Config
from selfplay.config.schema import RULES


@dataclass(frozen=True, slots=True, config=RULES)
class BranchConfig:
    """With rollout.play branches: alternative turns are sampled at a state and played to the end,
    which credits single turns."""

    turns: Literal["all", "first", "decisions"] = "all"
    """which of the policy's turns become branch points: all, the first turns, or decisions (turns
    that must answer a proposal) (docs/branches.md)"""
    per_game: int = Field(default=1, ge=1, le=1_000)
    """limit of branch points per game for first and decisions"""
    siblings: int = Field(default=4, ge=2, le=1_000)
    """alternative turns compared at a branch point, including the turn of the played game"""
    continuations: int = Field(default=1, ge=1, le=1_000)
    """games played to the end from each alternative turn"""

    @property
    def compares_turns(self) -> bool:
        """Whether all groups are groups of turns, none of games."""
        return self.turns == "all"

    def check(self, config: Config) -> None:
        """Raise ValueError for settings of other sections that do not fit."""
        game, algorithm = config.game, config.algorithm
        if self.turns == "decisions" and game.is_imported and not game.kit.ANSWERS:
            raise ValueError(
                f"rollout.options.turns must not be decisions with game.name {game.name}, which "
                "has no proposals to answer; nearest: all"
            )
        if not algorithm.groups:
            raise ValueError(
                f"algorithm.advantage must be one of {', '.join(COMPARED_IN_GROUPS)} with "
                "rollout.play branches, whose baseline is the mean over the turns of a branch "
                f"point, got {algorithm.advantage}"
            )


OPTIONS = {"branches": BranchConfig}
