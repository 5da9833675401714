"""The seats that the policy can play."""

from __future__ import annotations

from dialop.specs import nearest
from selfplay.config import GameConfig, RolloutConfig
from selfplay.errors import SettingsError


def chosen_seats(game: GameConfig, rollout: RolloutConfig) -> tuple[int, ...] | None:
    """The seats that the policy has in every game if they are fewer than all; None if it can have
    all. They come from `rollout.policy_seats`, else from the game's `POLICY_SEATS`.

    Raises SettingsError for roles that the game lacks.
    """
    kit = game.kit
    for role in rollout.policy_seats:
        if role not in kit.ROLES:
            raise SettingsError(
                f"rollout.policy_seats must be roles of {game.name} "
                f"({', '.join(dict.fromkeys(kit.ROLES))}), got {role}{nearest(role, kit.ROLES)}"
            )
    named = tuple(s for s, role in enumerate(kit.ROLES) if role in rollout.policy_seats)
    seats = named or kit.POLICY_SEATS
    return None if len(seats) == len(kit.ROLES) else seats


def partner_seats(game: GameConfig, rollout: RolloutConfig) -> list[int]:
    """The seats that a partner may have: those that the policy lacks, or all in turn."""
    chosen = chosen_seats(game, rollout) or ()
    return [seat for seat in range(len(game.kit.ROLES)) if seat not in chosen]


def able_seats(game: GameConfig, rollout: RolloutConfig) -> list[int]:
    """The seats that the policy has learned: the game's, and those set by the run."""
    kit = game.kit
    roles = enumerate(kit.ROLES)
    return [s for s, role in roles if s in kit.POLICY_SEATS or role in rollout.policy_seats]
