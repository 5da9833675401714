"""Which partners play in a step of several policies, and in whose seats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from selfplay.rollout.episode import Episode
from selfplay.rollout.seating import SELF_PLAY, Cast, Partner


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
