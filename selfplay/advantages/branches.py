"""Samples of branch points: sibling turns, and the games after them.

Each sibling turn is one sample, rewarded with the mean of its continuations, and the siblings form
a group. Continuations share a state like the games of an instance, so they also form groups, one
per seat, which train the turns after the sibling. A token is trained in at most one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from selfplay.advantages.rewards import (
    move_rewards,
    name_of,
    rewarded,
    seat_reward,
    seat_sample,
    seating_of,
    spans_until,
    trained_seats,
)
from selfplay.advantages.sample import Sample
from selfplay.config import RewardConfig
from selfplay.rollout.branches import siblings_of
from selfplay.rollout.episode import BranchPoint, Episode


def branch_samples(episodes: Sequence[Episode], *, reward: RewardConfig) -> list[Sample]:
    """Samples of each sibling turn, with the mean reward of its continuations, and of each
    continuation's later turns.

    The played game is sibling 0, continuation 0. It already trains as a game of its instance, so
    its later turns give no sample here.
    """
    samples = []
    for episode in episodes:
        for point in episode.branches:
            for sibling, continuations in enumerate(siblings_of(episode, point)):
                sibling_name = f"turn {point.turn} sibling {sibling}"
                samples.append(_turn_sample(continuations, point, sibling_name, reward))
                for number, continuation in enumerate(continuations):
                    if continuation is not episode:
                        name = f"{sibling_name} continuation {number}"
                        samples += _after(continuation, point, name, reward)
    return samples


def _turn_sample(
    continuations: Sequence[Episode], point: BranchPoint, name: str, config: RewardConfig
) -> Sample:
    """The sample of one turn, rewarded with the mean reward of its continuations."""
    episode, seat = continuations[0], point.seat
    span = spans_until(episode, seat, point.turn + 1)[-1]
    start, end = span.start, span.end
    sample = seat_sample(episode, seat)
    value = sum(seat_reward(c, seat, config=config) for c in continuations) / len(continuations)
    # Rewards of earlier moves are equal in all continuations and not part of this turn's return.
    before = move_rewards(episode, seat).items()
    value -= sum(reward for number, reward in before if number < point.turn)
    return replace(
        sample,
        name=f"{name_of(episode)} {name}",
        group=f"turn {point.turn} of {name_of(episode)}",
        ids=sample.ids[:end],  # tokens after the last trained one are not needed
        mask=[*[0] * start, *sample.mask[start:end]],
        old_logprobs=sample.old_logprobs[:end],
        advantages=sample.advantages[:end],
        starts=tuple(start for start in sample.starts if start < end),
        returns=[value] * end,
        seating=seating_of(episode, seat),
    )


def _after(episode: Episode, point: BranchPoint, name: str, config: RewardConfig) -> list[Sample]:
    """The turns after the sibling turn, one sample per seat that has any."""
    samples = []
    for seat in trained_seats(episode):
        sample = seat_sample(episode, seat)
        until = spans_until(episode, seat, point.turn + 1)
        start = until[-1].end if until else 0
        sample = replace(
            sample,
            name=f"{name_of(episode)} {name} seat {seat}",
            mask=[*[0] * start, *sample.mask[start:]],
            group=f"seat {seat} after turn {point.turn} of {name_of(episode)}",
        )
        if 1 in sample.mask:
            samples.append(rewarded(sample, episode, seat, config))
    return samples
