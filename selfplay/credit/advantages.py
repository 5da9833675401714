"""From episodes to samples with advantages: rewards first, then group statistics over all ranks.

A group is (instance, seat, partner), or the sibling turns of one state. The two seats of one game
are never each other's baseline: they share a reward, so their advantage would be exactly zero.
Between the two steps the trainer may change rewards (a KL penalty).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import TypeVar

from selfplay.config import COMPARED_IN_GROUPS, AlgorithmConfig, RewardConfig
from selfplay.credit.baselines import (
    batch_moments,
    group_mean,
    leave_one_out,
    moved_average,
    reward_std,
)
from selfplay.credit.returns import (
    branch_samples,
    episode_samples,
    role_of,
    seat_sample,
    trained_seats,
)
from selfplay.credit.rewards import part_sums, seat_reward
from selfplay.credit.sample import Sample, trained_stretches
from selfplay.distributed import World, gather_objects
from selfplay.rollout.episode import Episode

T = TypeVar("T")
ZERO_VARIANCE = 1e-9  # a group whose rewards differ by less has zero variance


@dataclass(frozen=True, slots=True)
class CreditStats:
    """How many groups a step had and how many of them had zero variance; those of branch points are
    counted separately.

    `reward_stds` has each instance's standard deviation of rewards, `parts` the sums of the
    reward's parts.
    """

    num_groups: int
    num_zero_variance_groups: int
    num_branch_groups: int = 0
    num_zero_variance_branch_groups: int = 0
    reward_stds: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What baselines need to know of a sample: the number of its trained tokens, and the mean and
    variance of their values."""

    name: str
    group: str
    role: str
    num_tokens: int
    mean: float
    variance: float


def reward_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> tuple[list[Sample], CreditStats]:
    """Samples with rewards and without advantages. Zero-variance groups are dropped if the method's
    baseline is the group's own mean."""
    games = _by(episode_samples(episodes, algorithm=algorithm, reward=reward), "group")
    turns = _by(branch_samples(episodes, algorithm=algorithm, reward=reward), "group")
    groups = games | turns
    # With a critic the baseline is the critic's estimate, so no group counts as zero-variance.
    critic = algorithm.method == "ppo"
    zero_variance = {
        name for name, group in groups.items() if not critic and _has_zero_variance(group)
    }
    dropped = zero_variance if algorithm.method in COMPARED_IN_GROUPS else set()
    samples = [s for name, group in groups.items() if name not in dropped for s in group]
    return samples, CreditStats(
        num_groups=len(games),
        num_zero_variance_groups=len(zero_variance & games.keys()),
        num_branch_groups=len(turns),
        num_zero_variance_branch_groups=len(zero_variance & turns.keys()),
        reward_stds=_reward_stds(episodes, reward=reward),
        parts=part_sums(episodes, config=reward),
    )


def compute_advantages(
    samples: Sequence[Sample],
    baselines: Mapping[str, float],
    *,
    algorithm: AlgorithmConfig,
    world: World,
) -> tuple[list[Sample], dict[str, float]]:
    """This rank's samples with advantages, and the moving-average baselines (ema) of the next step,
    which are equal on every rank. Every rank must call."""
    everyone = gather_objects(sample_statistics(samples, algorithm=algorithm), world)
    with_advantages = assign_advantages(
        samples, algorithm=algorithm, everyone=everyone, baselines=baselines
    )
    return with_advantages, updated_baselines(baselines, everyone, algorithm=algorithm)


def sample_statistics(
    samples: Sequence[Sample], *, algorithm: AlgorithmConfig
) -> list[SampleStatistics]:
    """The statistics of every sample that belongs to a group."""
    statistics = []
    for sample in samples:
        if sample.group:
            mean, variance = _one_return(sample, algorithm), 0.0
            if mean is None:
                values_T = list(compress(_token_values(sample, algorithm), sample.mask))
                mean, variance = _mean_and_variance(values_T)
            statistics.append(
                SampleStatistics(
                    sample.name, sample.group, sample.role, sum(sample.mask), mean, variance
                )
            )
    return statistics


def assign_advantages(
    samples: Sequence[Sample],
    *,
    algorithm: AlgorithmConfig,
    everyone: Sequence[Sequence[SampleStatistics]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> list[Sample]:
    """The samples with an advantage on every trained token: (value - baseline) / divisor.

    `everyone` holds the statistics of every rank, since a group may lie on several; a sample that
    several ranks hold counts once. None means that no other rank has samples. `baselines` are the
    moving averages of earlier steps, by role. Samples without a group keep their advantages.
    """
    if algorithm.method == "ppo":
        return list(samples)  # the critic's values give the advantages later (`with_gae`)
    if everyone is None:
        everyone = [sample_statistics(samples, algorithm=algorithm)]
    scales = _baselines_and_divisors(_unique(everyone), algorithm, baselines or {})
    return [
        _with_advantages(sample, *scales[sample.name], algorithm=algorithm)
        if sample.group
        else sample
        for sample in samples
    ]


def updated_baselines(
    baselines: Mapping[str, float],
    everyone: Sequence[Sequence[SampleStatistics]],
    *,
    algorithm: AlgorithmConfig,
) -> dict[str, float]:
    """Each role's moving average after a step; {} unless the method is ema."""
    if algorithm.method != "ema":
        return {}
    moved = {
        role: moved_average(
            baselines.get(role),
            sum(s.mean for s in members) / len(members),
            decay=algorithm.ema_decay,
        )
        for role, members in _by(_unique(everyone), "role").items()
    }
    return {**baselines, **moved}


def imitation_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Teachers' transcripts as samples: every token worth imitating has advantage 1."""
    return [
        replace(sample, advantages=[float(m) for m in sample.mask])
        for episode in episodes
        for seat in trained_seats(episode)
        for sample in [seat_sample(episode, seat)]
    ]


def _baselines_and_divisors(
    statistics: Sequence[SampleStatistics],
    algorithm: AlgorithmConfig,
    baselines: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    """Each sample's baseline and divisor, by its name."""
    method, scales = algorithm.method, dict[str, tuple[float, float]]()
    if method == "reinforce_pp" and statistics:
        mean, std = batch_moments(
            [s.mean for s in statistics],
            [s.variance for s in statistics],
            [s.num_tokens for s in statistics],
        )
        return {s.name: (mean, std + algorithm.advantage_eps) for s in statistics}
    for key, members in _by(statistics, "role" if method == "ema" else "group").items():
        means_G = [member.mean for member in members]
        divisor = 1.0
        if method == "ema":
            # Only earlier steps' rewards, because this step's would bias the gradient; the first
            # step has no others.
            start = baselines[key] if key in baselines else sum(means_G) / len(means_G)
            baselines_G = [start] * len(members)
        elif method == "rloo":
            baselines_G = leave_one_out(means_G)
        elif method in ("grpo", "dr_grpo"):
            baselines_G = group_mean(means_G)
        else:
            raise ValueError(f"algorithm.method {method} has no baseline in credit/advantages.py")
        if method == "grpo":
            divisor = reward_std(means_G, [m.variance for m in members]) + algorithm.advantage_eps
        scales |= {m.name: (b, divisor) for m, b in zip(members, baselines_G, strict=True)}
    return scales


def _with_advantages(
    sample: Sample, baseline: float, divisor: float, *, algorithm: AlgorithmConfig
) -> Sample:
    advantages, one = [0.0] * len(sample.mask), _one_return(sample, algorithm)
    values_N = _token_values(sample, algorithm) if one is None else []
    for start, end in trained_stretches(sample.mask):
        advantages[start:end] = (
            [(value - baseline) / divisor for value in values_N[start:end]]
            if one is None
            else [(one - baseline) / divisor] * (end - start)
        )
    return replace(sample, advantages=advantages)


def _one_return(sample: Sample, algorithm: AlgorithmConfig) -> float | None:
    """The return of every token if they are all equal; None if some turn or token has its own."""
    by_token = algorithm.method == "reinforce_pp" or sample.penalties or sample.move_rewards
    return None if by_token else sum(sample.rewards)


def _token_values(sample: Sample, algorithm: AlgorithmConfig) -> list[float]:
    """Each token's return: the sum of all rewards (reinforce_pp: of those from the token on), plus
    the moves' rewards from the token on, minus the penalty of the token's turn."""
    if algorithm.method == "reinforce_pp":
        values_N = list(accumulate(reversed(sample.rewards)))[::-1]
    else:
        values_N = [sum(sample.rewards)] * len(sample.rewards)
    for start, end, penalty in sample.penalties:
        values_N[start:end] = [value - penalty for value in values_N[start:end]]
    for token, reward in sample.move_rewards:
        values_N[: token + 1] = [value + reward for value in values_N[: token + 1]]
    return values_N


def _unique(everyone: Sequence[Sequence[SampleStatistics]]) -> list[SampleStatistics]:
    return list({one.name: one for part in everyone for one in part}.values())


def _by(entries: Sequence[T], key: str) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for entry in entries:
        groups.setdefault(getattr(entry, key), []).append(entry)
    return groups


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population variance. The mean of equal values is exact, without a sum's rounding."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


def _reward_stds(episodes: Sequence[Episode], *, reward: RewardConfig) -> dict[str, float]:
    """Each instance's standard deviation of rewards, in the role where it is largest; near 0 if the
    instance is too hard or solved."""
    by_role: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        for seat in trained_seats(episode):
            roles = by_role.setdefault(episode.instance, {})
            rewards = roles.setdefault(role_of(episode, seat), [])
            rewards.append(seat_reward(episode, seat, config=reward))
    return {
        instance: max(
            reward_std(rewards, [0.0] * len(rewards))
            if max(rewards) - min(rewards) > ZERO_VARIANCE
            else 0.0
            for rewards in roles.values()
        )
        for instance, roles in by_role.items()
    }


def _has_zero_variance(members: Sequence[Sample]) -> bool:
    """Whether all samples of a group have the same reward, and no penalty or reward of one turn."""
    rewards = [sum(sample.rewards) for sample in members]
    by_turn = any(sample.penalties or sample.move_rewards for sample in members)
    return max(rewards) - min(rewards) < ZERO_VARIANCE and not by_turn
