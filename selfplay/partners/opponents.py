"""The schedule of the policy's partners over the steps (`rollout.opponents`), and the built-in one.

docs/doors.md describes a custom class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from selfplay.config import Config
from selfplay.config.options import options_at
from selfplay.config.player_spec import POOL, parse_shares
from selfplay.config.plugins import function_of, own_call, plain_state
from selfplay.data.seeds import named_seed, pick
from selfplay.distributed import World, broadcast_object, gather_objects, raise_on_all_ranks
from selfplay.errors import OwnFault
from selfplay.policies.seats import games_beside
from selfplay.rollout.episode import Episode

KEY = "rollout.opponents"
POOL_SEED = "past self"  # an older word for the policy pool; it keeps the draws of old runs


@dataclass(frozen=True, slots=True)
class Result:
    """A partner's games of a step over all ranks, without aborted ones: their number, and the mean
    normalized scores (0 to 1) of the policy's and the partner's seats. In self-play both are the
    mean over all seats."""

    games: int
    score: float
    partner_score: float


class Opponents:
    """Draws the partners of each step. Each rank creates one; the draws of rank 0 hold on all.

    A subclass may declare its settings as a frozen dataclass `Options`; `options` is then an
    instance made from `rollout.options`. Its `__init__` may raise ValueError for settings that
    contradict each other.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = options_at(KEY, config)

    def draw(self, step: int, members: Sequence[str]) -> Mapping[str, float]:
        """Each partner's share of the instances in the step after `step` finished ones. Partners
        are named by the specs of `rollout.partners` without shares; `pool` stands for its
        `members`, such as "pool:20" for the policy after 20 steps, oldest first.

        Shares are at least 0, and are divided by their sum. Random draws need named seeds, or a
        resumed run draws other partners.
        """
        raise NotImplementedError

    def played(self, step: int, results: Mapping[str, Result]) -> None:
        """Receive the results of the step's games, by partner.

        Called once per step, on every rank with the same results, before the weights change. A
        partner whose games were all aborted has no result.
        """

    def state(self) -> Mapping[str, Any]:
        """The state that a resumed run needs for the same draws, as plain JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()` that was not empty.

        A run that changed `rollout.opponents` passes the state of the earlier class.
        """


class Shares(Opponents):
    """The shares of `rollout.partners` in every step, with one uniformly drawn member of the pool.

    A schedule may extend it: the draw of one step does not depend on other steps."""

    def draw(self, step: int, members: Sequence[str]) -> dict[str, float]:
        shares = parse_shares(self.config.rollout.partners)
        seed = named_seed(self.config.seed, POOL_SEED, step)
        return {
            pick(members, [1.0] * len(members), seed) if spec.kind == POOL else spec.text: share
            for spec, share in shares
        }


def make_opponents(config: Config, state: Mapping[str, Any]) -> Opponents:
    """The instance of `rollout.opponents`, restored to a checkpoint's `state`. Raises OwnFault if a
    custom class fails."""
    name = config.rollout.opponents
    with own_call(KEY, name):
        opponents: Opponents = function_of(KEY, name)(config)
    restore_opponents(opponents, state)
    return opponents


def restore_opponents(opponents: Opponents, state: Mapping[str, Any]) -> None:
    """Restore them to a checkpoint's `state`, if it is not empty. Raises OwnFault if a custom class
    fails."""
    with own_call(KEY, opponents.config.rollout.opponents):
        if state:
            opponents.restore(state)


def drawn(
    opponents: Opponents, step: int, members: Sequence[str], world: World
) -> list[tuple[str, float]]:
    """The partners drawn for a step, with shares that sum to 1. Every rank must call.

    Raises OwnFault, on every rank, for an unknown partner or an invalid share.
    """
    config = opponents.config
    with raise_on_all_ranks(world), own_call(KEY, config.rollout.opponents):
        shares = checked_shares(opponents.draw(step, members), partner_names(config, members))
    return broadcast_object(shares, world)


def partner_names(config: Config, members: Sequence[str]) -> list[str]:
    """The names allowed in a draw: the specs of `rollout.partners` and the pool's members."""
    names: list[str] = []
    for spec, _ in parse_shares(config.rollout.partners):
        names += members if spec.kind == POOL else [spec.text]
    return names


def checked_shares(shares: Any, known: Sequence[str]) -> list[tuple[str, float]]:
    """The partners of a draw with positive shares, scaled to sum to 1. Raises OwnFault for a
    partner that is not `known` or an invalid share."""
    if not isinstance(shares, Mapping) or not shares:
        raise OwnFault(f"draw must give a share for each partner, got {shares!r}")
    for name, share in shares.items():
        if name not in known:
            raise OwnFault(f"draw must name partners among {', '.join(known)}, got {name!r}")
        number = isinstance(share, int | float) and math.isfinite(share)
        if not number or share < 0:
            raise OwnFault(f"draw must give a share of at least 0, got {share!r} for {name}")
    total = sum(shares.values())
    if total <= 0:
        raise OwnFault(f"draw must give a positive share, got {dict(shares)}")
    return [(name, share / total) for name, share in shares.items() if share > 0]


def pass_results(
    opponents: Opponents, step: int, episodes: Sequence[Episode], world: World, policy: str = ""
) -> None:
    """Pass the results of all ranks' games to the opponents of this policy. Every rank must call.

    Raises OwnFault, on every rank, if a custom class fails."""
    scores: dict[str, list[tuple[float, float]]] = {}
    own = [(each.partner, both_scores(each)) for each in games_beside(policy, episodes)]
    for partner, both in (each for rank in gather_objects(own, world) for each in rank):
        scores.setdefault(partner, []).append(both)
    results = {
        partner: Result(len(games), *map(fmean, zip(*games, strict=True)))
        for partner, games in scores.items()
    }
    with raise_on_all_ranks(world), own_call(KEY, opponents.config.rollout.opponents):
        opponents.played(step, results)


def both_scores(episode: Episode) -> tuple[float, float]:
    """The scores of the policy's seats and of the others; in self-play the same for both."""
    others = [s for s in range(len(episode.players)) if s not in episode.counted_seats]
    return episode.score, episode.outcome.score_of(others) if others else episode.score


def opponents_state(opponents: Opponents) -> dict[str, Any]:
    """A copy of the opponents' state as plain JSON. Raises OwnFault if it is not."""
    return dict(plain_state(KEY, opponents.config.rollout.opponents, opponents.state))
