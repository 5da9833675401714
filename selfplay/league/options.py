"""The settings of the opponents `league`, read without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from selfplay.config import Config
from selfplay.config.player_spec import POOL, parse_shares
from selfplay.config.schema import RULES


@dataclass(frozen=True, slots=True, config=RULES)
class LeagueOptions:
    """Which members of the policy pool play a step (docs/partners.md)."""

    by: Literal["hard", "close", "uniform"] = "hard"
    """draw members that the policy loses to, members that are about as good, or all equally"""
    members: int = Field(default=1, ge=1, le=100)
    """different members in a step; each is one more model in memory"""
    power: float = Field(default=2.0, ge=0.0, le=10.0)
    """of hard: a member's weight is the share that the policy loses to it, to this power"""

    def check(self, config: Config) -> None:
        """Raise ValueError without the partner `pool`, and for several policies, each of which has
        its own."""
        if config.policies:
            raise ValueError(
                "rollout.opponents must be shares or a class of your own with policies, got league,"
                " which draws from the pool of rollout.partners"
            )
        specs = [spec for spec, _ in parse_shares(config.rollout.partners)]
        if POOL not in [spec.kind for spec in specs]:
            raise ValueError(
                "rollout.partners must have pool with rollout.opponents league, which draws its "
                f"members, got {', '.join(spec.text for spec in specs)}"
            )


OPTIONS = {"league": LeagueOptions}
