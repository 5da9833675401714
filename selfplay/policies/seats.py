"""Who has which seat of several policies, and which partners play there in a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dialop.specs import nearest
from selfplay.config import Config
from selfplay.errors import SettingsError
from selfplay.rollout.episode import Episode
from selfplay.rollout.seating import SELF_PLAY, Cast, Partner


def policy_of_seat(config: Config) -> tuple[str, ...]:
    """The name of the policy that has each seat; "" for a single policy.

    Raises SettingsError for unknown roles, and for a seat without a policy or with several.
    """
    game, roles = config.game.name, config.game.kit.ROLES
    if not config.policies:
        return ("",) * len(roles)
    owners: list[list[str]] = [[] for _ in roles]
    for name, of in config.policies.items():
        for chosen in of.seats or (name,):
            seats = [s for s, role in enumerate(roles) if chosen in (s, role)]
            if not seats:
                known = ", ".join(dict.fromkeys(roles))
                raise SettingsError(
                    f"policies.{name}.seats must be roles of {game} ({known}) or numbers of "
                    f"seats below {len(roles)}, got {chosen}{nearest(str(chosen), roles)}"
                )
            for seat in seats:
                owners[seat].append(name)
    for seat, (role, names) in enumerate(zip(roles, owners, strict=True)):
        if len(names) != 1:
            raise SettingsError(
                f"policies must give each seat of {game} to one policy, got "
                f"{' and '.join(names) or 'none'} for seat {seat} ({role})"
            )
    return tuple(names[0] for names in owners)


def shared_out(
    drawn: Mapping[str, list[tuple[Partner, float]]], cast: Cast
) -> list[tuple[Partner, float]]:
    """The partners drawn for each policy, by its name, with their shares of the step's instances.

    Of several policies each that has partners gets an equal part of the instances, in which they
    play its seats as NAME=PARTNER.
    """
    if "" in drawn:
        return drawn[""]
    joined = []
    replaced = {name: own for name, own in drawn.items() if any(p.make_player for p, _ in own)}
    for name, own in replaced.items():
        seats = tuple(seat for seat, seated in enumerate(cast) if seated.name == name)
        for partner, share in own:
            if partner.make_player:
                partner = replace(partner, name=f"{name}={partner.name}", seats=seats)
            joined.append((partner, share / len(replaced)))
    return joined or [(SELF_PLAY, 1.0)]


def games_beside(policy: str, episodes: Sequence[Episode]) -> Sequence[Episode]:
    """The games of the policy's opponents, under the partner's name there: without those in which
    another policy's seats have a partner."""
    if not policy:
        return episodes
    names = ((game, game.partner.removeprefix(f"{policy}=")) for game in episodes)
    # A partner's own name may have an = too, but only behind a colon, as scripted:honest:tell=top.
    return [replace(game, partner=name) for game, name in names if not re.match(r"\w+=", name)]
