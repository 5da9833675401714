"""Dynamic sampling: play more instances in place of those whose groups have zero variance, up to a
budget (DAPO, arXiv 2503.14476, section 3.2). All ranks play the same number of rounds.
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
    """The games of a step, in one or more rounds. Every rank must call.

    `play` gets the places in the step's batch that this rank plays: first its share of
    `num_instances` places, then its share of the missing ones. The batch is full when it has as
    many groups with variance as the first round had groups. `algorithm.resample` limits how many
    places are added; 0 means one round.
    """
    episodes, stats = play(world.replica.share(num_instances))
    new_episodes, num_wanted, num_useful = episodes, 0.0, 0.0
    num_places, limit = num_instances, num_instances + algorithm.resample
    while num_places < limit:
        _, credit = reward_samples(new_episodes, algorithm=algorithm, reward=reward)
        num_with_variance = credit.num_groups - credit.num_zero_variance_groups
        num_groups, num_new = all_reduce_sum(
            [float(credit.num_groups), float(num_with_variance)], world
        )
        num_wanted, num_useful = num_wanted or num_groups, num_useful + num_new
        if num_useful >= num_wanted:
            break
        share_missing = (num_wanted - num_useful) * num_instances / num_wanted
        num_added = min(math.ceil(share_missing), limit - num_places)
        new_episodes, new_stats = play([num_places + i for i in world.replica.share(num_added)])
        episodes, stats = [*episodes, *new_episodes], _sum(stats, new_stats)
        num_places += num_added
    barrier(world)  # so that the wait for the last games is timed as play
    return episodes, stats


def _sum(one: RolloutStats, other: RolloutStats) -> RolloutStats:
    return RolloutStats(
        *(getattr(one, field.name) + getattr(other, field.name) for field in fields(RolloutStats))
    )
