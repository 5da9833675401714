"""From episodes to samples in two steps: what each sample earned, then how that compares.

A group is (instance, seat), and the partner where there is one. The two seats of one game are never
each other's baseline: they share a reward, so that advantage would be exactly zero. Between the two
steps a trainer may add to the rewards. Floats only; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfplay.advantages import grpo_advantages
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.play import Episode
from selfplay.rewards import seat_reward
from selfplay.samples import Sample

FLAT = 1e-9  # rewards of a group that differ by less carry no signal


@dataclass(frozen=True, slots=True)
class CreditStats:
    """How many groups a step had and how many carried no signal and were dropped."""

    num_groups: int
    num_flat_groups: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What the others of its group, on whatever rank, must know of a sample: `total` is the sum of
    its rewards."""

    name: str
    group: str
    total: float


def reward_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> tuple[list[Sample], CreditStats]:
    """Samples of all groups whose rewards differ, with their rewards and without advantages."""
    groups: dict[str, list[Sample]] = {}
    for episode in episodes:
        for seat, transcript in enumerate(episode.transcripts):
            if transcript is not None and any(transcript.mask):
                sample = _rewarded(episode, seat, config=reward)
                groups.setdefault(sample.group, []).append(sample)
    kept = {name: members for name, members in groups.items() if not _is_flat(members)}
    samples = [sample for members in kept.values() for sample in members]
    return samples, CreditStats(num_groups=len(groups), num_flat_groups=len(groups) - len(kept))


def standings(samples: Sequence[Sample]) -> list[Standing]:
    """What the ranks tell each other before advantages are assigned."""
    return [Standing(s.name, s.group, sum(s.rewards)) for s in samples if s.group]


def assign_advantages(
    samples: Sequence[Sample],
    *,
    algorithm: AlgorithmConfig,
    among: Sequence[Sequence[Standing]] | None = None,
) -> list[Sample]:
    """The samples with an advantage on every trained token, compared within their groups.

    `among` holds the standings of every rank, for a group's samples may have been dealt to several;
    ranks that hold the same sample count once. Left out, these samples are all there are. Samples
    without a group keep the advantages they have.
    """
    known = {s.name: s for part in (among or [standings(samples)]) for s in part}
    groups: dict[str, list[Standing]] = {}
    for standing in known.values():
        groups.setdefault(standing.group, []).append(standing)
    by_name: dict[str, float] = {}
    for members in groups.values():
        advantages_G = grpo_advantages(
            [member.total for member in members],
            divide_by_std=algorithm.advantage_std,
            eps=algorithm.advantage_eps,
        )
        by_name |= {m.name: a for m, a in zip(members, advantages_G, strict=True)}
    return [
        replace(sample, advantages=[by_name[sample.name] * m for m in sample.mask])
        if sample.group
        else sample
        for sample in samples
    ]


def imitation_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Teachers' transcripts as samples: every token worth imitating weighs 1."""
    return [
        _sample(episode, seat, weight=1.0)
        for episode in episodes
        for seat, transcript in enumerate(episode.transcripts)
        if transcript is not None and any(transcript.mask)
    ]


def _rewarded(episode: Episode, seat: int, *, config: RewardConfig) -> Sample:
    """The seat's sample with its reward at its last trained token, in its group."""
    sample = _sample(episode, seat, weight=0.0)
    rewards = [0.0] * len(sample.ids)
    last = max(i for i, m in enumerate(sample.mask) if m)
    rewards[last] = seat_reward(episode, seat, config=config)
    role = _role(episode, seat)
    return replace(sample, rewards=rewards, group=f"{role} of {episode.instance}", role=role)


def _role(episode: Episode, seat: int) -> str:
    """The seat, and beside a partner that partner: what a baseline may depend on."""
    partners = [
        player
        for player, transcript in zip(episode.players, episode.transcripts, strict=True)
        if transcript is None
    ]
    return " beside ".join([f"seat {seat}", *partners])


def _is_flat(members: Sequence[Sample]) -> bool:
    totals = [sum(sample.rewards) for sample in members]
    return max(totals) - min(totals) < FLAT


def _sample(episode: Episode, seat: int, *, weight: float) -> Sample:
    transcript = episode.transcripts[seat]
    assert transcript is not None
    return Sample(
        name=f"instance {episode.instance} episode {episode.index} seat {seat}",
        ids=transcript.ids,
        mask=transcript.mask,
        old_logprobs=transcript.logprobs,
        advantages=[weight * m for m in transcript.mask],
    )
