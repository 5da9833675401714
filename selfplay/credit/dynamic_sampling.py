"""Fill a step's batch: play on with more instances where groups turned out flat (DAPO, arXiv
2503.14476, section 3.2, dynamic sampling), up to a budget. Every rank takes as many rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.credit.advantages import reward_samples
from selfplay.distributed import World, all_reduce_sum, barrier
from selfplay.rollout.driver import RolloutStats
from selfplay.rollout.episode import Episode

Played = tuple[list[Episode], RolloutStats]


def play_full(
    play: Callable[[Sequence[int]], Played],
    *,
    num_instances: int,
    algorithm: AlgorithmConfig,
    reward: RewardConfig,
    world: World,
) -> Played:
    """The games of a step: `play` is given this rank's share of the batch's places, then of as many
    further ones as instances are missing.

    An instance is missing where all its groups are flat; the batch is full when as many groups as
    the first round had differ within themselves. Without `algorithm.resample` there is one round.
    """
    batch = num_instances
    episodes, played = play(world.replica.share(batch))
    fresh, wanted, found = episodes, 0.0, 0.0
    num_places, limit = batch, batch + algorithm.resample
    while num_places < limit:
        _, stats = reward_samples(fresh, algorithm=algorithm, reward=reward)
        counts = [float(stats.num_groups), float(stats.num_groups - stats.num_zero_variance_groups)]
        num_groups, num_telling = all_reduce_sum(counts, world)
        wanted, found = wanted or num_groups, found + num_telling
        if found >= wanted:
            break
        num = min(math.ceil((wanted - found) * batch / wanted), limit - num_places)
        fresh, more = play([num_places + i for i in world.replica.share(num)])
        episodes, played = [*episodes, *fresh], _sum(played, more)
        num_places += num
    barrier(world)  # the wait for the games that end last is play's, not the next stage's
    return episodes, played


def _sum(one: RolloutStats, other: RolloutStats) -> RolloutStats:
    return RolloutStats(
        *(getattr(one, entry.name) + getattr(other, entry.name) for entry in fields(RolloutStats))
    )
