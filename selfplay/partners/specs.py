"""Reads the spec of a partner, and checks that it can play the game."""

from __future__ import annotations

from collections.abc import Sequence

from dialop.kit import Kit
from selfplay.config import GameConfig, RolloutConfig
from selfplay.config.player_spec import POOL, SCRIPTED, SELF, Spec, parse_spec
from selfplay.errors import SettingsError
from selfplay.rollout.seat_rules import chosen_seats


def read_spec(text: str, game: GameConfig, rollout: RolloutConfig, *, what: str) -> Spec:
    """Parse a partner spec.

    Raises SettingsError, which starts with `what`, for an invalid spec, a script that the game does
    not have, or a partner that can play none of the other seats.
    """
    kit, seats = game.kit, chosen_seats(game, rollout)
    try:
        spec = parse_spec(text, kit.SCRIPT_NAMES)
        if spec.kind == SCRIPTED:
            kit.make_script(spec.argument, seed=0)
    except ValueError as error:
        raise SettingsError(f"{what}: {error}") from None
    if seats is None:
        return spec
    others = [seat for seat in range(len(kit.ROLES)) if seat not in seats]
    limited = not set(others) & set(kit.POLICY_SEATS)
    names = ", ".join(f"{seat} ({kit.ROLES[seat]})" for seat in others)
    if spec.kind == SELF or (spec.kind == POOL and limited):
        such_as = f", {what}=[{able}] the others" if (able := _script_for(kit, others)) else ""
        raise SettingsError(
            f"{what} must not be the policy in {game.name} for seat {names}, which it does not "
            f"play, got {text!r}; rollout.policy_seats sets the roles it plays{such_as}"
        )
    if spec.kind == SCRIPTED:
        seated = kit.seated(spec.argument)
        if all(seated[seat] != spec.argument for seat in others):
            instead = f"; nearest is {able}" if (able := _script_for(kit, others)) else ""
            raise SettingsError(
                f"{what}: partner {text!r} cannot play seat {names} of {game.name}{instead}"
            )
    return spec


def _script_for(kit: Kit, seats: Sequence[int]) -> str:
    """The first scripted player that can play the first of these seats, "" if none can."""
    able = (name for name in kit.SCRIPT_NAMES if kit.seated(name)[seats[0]] == name)
    return next((f"{SCRIPTED}:{name}" for name in able), "")
