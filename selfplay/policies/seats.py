"""Which partners play in the seats of several policies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from selfplay.rollout.episode import Episode
from selfplay.rollout.seating import Partner


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
