"""Who has which seat of several policies, and which partners play there in a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dialop.specs import nearest
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.errors import SettingsError
from selfplay.rollout.episode import Episode
from selfplay.rollout.seating import Cast, Partner, Seated


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


def seats_of(config: Config, name: str) -> list[int]:
    """The seats of the policy `name` if there are several policies."""
    return [s for s, owner in enumerate(policy_of_seat(config)) if name and owner == name]


def cast_of(config: Config, renderings: Mapping[str, Rendering]) -> Cast:
    """The policy of each seat, by the renderings of the policies; the first one's engine runs the
    games."""
    host = config.policy_names[0]
    return [
        Seated(name, renderings[name], "" if name == host else name)
        for name in policy_of_seat(config)
    ]


def for_policy(partner: Partner, policy: str, seats: Sequence[int]) -> Partner:
    """The partner as it plays these seats of one of several policies, under NAME=PARTNER."""
    if not policy or partner.make_player is None:
        return partner
    return replace(partner, name=f"{policy}={partner.name}", seats=tuple(seats))


def games_beside(policy: str, episodes: Sequence[Episode]) -> Sequence[Episode]:
    """The games of the policy's opponents, under the partner's name there: without those in which
    another policy's seats have a partner."""
    if not policy:
        return episodes
    names = ((game, game.partner.removeprefix(f"{policy}=")) for game in episodes)
    # A partner's own name may have an = too, but only behind a colon, as scripted:honest:tell=top.
    return [replace(game, partner=name) for game, name in names if not re.match(r"\w+=", name)]
