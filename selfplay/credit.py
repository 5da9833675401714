"""From episodes to samples: groups, their rewards, an advantage for every trained token.

A group is (instance, seat). The two seats of one game are never each other's baseline: they share a
reward, so that advantage would be exactly zero. Floats only; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfplay.advantages import grpo_advantages
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.rewards import seat_reward
from selfplay.rollout import Episode
from selfplay.samples import Sample

FLAT = 1e-9  # rewards of a group that differ by less carry no signal


@dataclass(frozen=True, slots=True)
class CreditStats:
    """How many groups a step had and how many carried no signal and were dropped."""

    num_groups: int
    num_flat_groups: int


def credit(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> tuple[list[Sample], CreditStats]:
    """Samples of all groups whose rewards differ; a trained token has its episode's advantage."""
    groups: dict[tuple[str, int], list[Episode]] = {}
    for episode in episodes:
        for seat, transcript in enumerate(episode.transcripts):
            if transcript is not None and any(transcript.mask):
                groups.setdefault((episode.instance, seat), []).append(episode)
    samples: list[Sample] = []
    num_flat = 0
    for (instance, seat), members in groups.items():
        rewards_G = [seat_reward(episode, seat, config=reward) for episode in members]
        if max(rewards_G) - min(rewards_G) < FLAT:
            num_flat += 1
            continue
        advantages_G = grpo_advantages(
            rewards_G, divide_by_std=algorithm.advantage_std, eps=algorithm.advantage_eps
        )
        for episode, advantage in zip(members, advantages_G, strict=True):
            samples.append(
                _sample(
                    episode,
                    seat,
                    f"instance {instance} episode {episode.index} seat {seat}",
                    advantage,
                )
            )
    return samples, CreditStats(num_groups=len(groups), num_flat_groups=num_flat)


def imitation_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Teachers' transcripts as samples: every token worth imitating weighs 1."""
    return [
        _sample(
            episode, seat, f"instance {episode.instance} episode {episode.index} seat {seat}", 1.0
        )
        for episode in episodes
        for seat, transcript in enumerate(episode.transcripts)
        if transcript is not None and any(transcript.mask)
    ]


def _sample(episode: Episode, seat: int, name: str, advantage: float) -> Sample:
    transcript = episode.transcripts[seat]
    assert transcript is not None
    return Sample(
        name=name,
        ids=transcript.ids,
        mask=transcript.mask,
        old_logprobs=transcript.logprobs,
        advantages=[advantage * m for m in transcript.mask],
    )
