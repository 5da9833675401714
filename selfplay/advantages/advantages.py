"""From samples with rewards to samples with advantages, by group statistics over all ranks.

A group is (instance, seat, partner), or the sibling turns of one state. The two seats of one game
are never each other's baseline: they share a reward, so their advantage would be exactly zero.

Shapes: G samples of a group, B samples of a batch, T tokens of a sample, K of them trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TypeVar

from selfplay.advantages.branches import branch_samples
from selfplay.advantages.rewards import (
    episode_samples,
    seat_sample,
    trained_seats,
)
from selfplay.advantages.sample import Sample, trained_stretches
from selfplay.config import COMPARED_IN_GROUPS, AlgorithmConfig, RewardConfig
from selfplay.distributed import World, gather_objects
from selfplay.rollout.episode import Episode

T = TypeVar("T")
ZERO_VARIANCE = 1e-9  # a group has zero variance if its returns' standard deviation is smaller
EMA_DECAY = 0.8  # a step's weight in the moving average of `ema` is 1 - EMA_DECAY


@dataclass(frozen=True, slots=True)
class CreditStats:
    """How many groups a step had and how many of them had zero variance; those of branch points are
    counted separately. `rewards` has (total reward, mean return of a trained token) of each seat's
    game by the name of its sample, those of dropped groups included."""

    num_groups: int
    num_zero_variance_groups: int
    num_branch_groups: int = 0
    num_zero_variance_branch_groups: int = 0
    rewards: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What baselines need of a sample: the number of its trained tokens, and the mean and variance
    of their returns. If one reward covers the full episode, the variance is 0."""

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
    games = _grouped(episode_samples(episodes, algorithm=algorithm, reward=reward), by="group")
    turns = _grouped(branch_samples(episodes, algorithm=algorithm, reward=reward), by="group")
    groups = games | turns
    rewards = {
        sample.name: (sample.total_reward, one.mean)
        for group in games.values()
        for sample, one in zip(group, sample_statistics(group), strict=True)
    }
    # With a critic the baseline is the critic's estimate, so no group counts as zero-variance.
    critic = algorithm.advantage == "ppo"
    zero_variance = {
        name
        for name, group in groups.items()
        if not critic and group_std(sample_statistics(group)) < ZERO_VARIANCE
    }
    dropped = zero_variance if algorithm.advantage in COMPARED_IN_GROUPS else set()
    samples = [s for name, group in groups.items() if name not in dropped for s in group]
    return samples, CreditStats(
        num_groups=len(games),
        num_zero_variance_groups=len(zero_variance & games.keys()),
        num_branch_groups=len(turns),
        num_zero_variance_branch_groups=len(zero_variance & turns.keys()),
        rewards=rewards,
    )


def compute_advantages(
    samples: Sequence[Sample],
    baselines: Mapping[str, float],
    *,
    algorithm: AlgorithmConfig,
    world: World,
) -> tuple[list[Sample], dict[str, float]]:
    """This rank's samples with advantages, and the moving-average baselines (ema) of the next step,
    which are equal on every rank. Samples without a group keep their advantages.

    `baselines` are the moving averages of earlier steps by role. Every rank must call: a group may
    lie on several ranks."""
    if algorithm.advantage == "ppo":
        return list(samples), {}  # the critic's values give the advantages later (`with_gae`)
    by_rank = gather_objects(sample_statistics(samples), world)
    # A sample that several ranks hold counts once.
    statistics = list({one.name: one for of_rank in by_rank for one in of_rank}.values())
    scales = baselines_and_divisors(statistics, baselines, algorithm=algorithm)
    with_advantages = [
        _with_advantages(sample, *scales[sample.name]) if sample.group else sample
        for sample in samples
    ]
    return with_advantages, updated_baselines(baselines, statistics, algorithm=algorithm)


def _with_advantages(sample: Sample, baseline: float, divisor: float) -> Sample:
    """The sample with (return - baseline) / divisor on every trained token."""
    returns_T = token_returns(sample)
    advantages_T = [0.0] * len(returns_T)
    for start, end in trained_stretches(sample.mask):
        advantages_T[start:end] = [(g - baseline) / divisor for g in returns_T[start:end]]
    return replace(sample, advantages=advantages_T)


def sample_statistics(samples: Sequence[Sample]) -> list[SampleStatistics]:
    """The statistics of every sample that belongs to a group."""
    statistics = []
    for sample in samples:
        if sample.group:
            returns_K = list(compress(token_returns(sample), sample.mask))
            mean, variance = _mean_and_variance(returns_K)
            statistics.append(
                SampleStatistics(
                    sample.name, sample.group, sample.role, len(returns_K), mean, variance
                )
            )
    return statistics


def token_returns(sample: Sample) -> list[float]:
    """Each token's return [T]: the final reward, plus the moves' rewards from the token on, minus
    the penalty of the token's turn."""
    returns_T = [sample.reward] * len(sample.ids)
    for start, end, penalty in sample.penalties:
        returns_T[start:end] = [g - penalty for g in returns_T[start:end]]
    for token, reward in sample.move_rewards:
        returns_T[: token + 1] = [g + reward for g in returns_T[: token + 1]]
    return returns_T


# --- baselines and divisors -----------------------------------------------------------------------


def baselines_and_divisors(
    statistics: Sequence[SampleStatistics],
    baselines: Mapping[str, float],
    *,
    algorithm: AlgorithmConfig,
) -> dict[str, tuple[float, float]]:
    """Each sample's baseline and divisor, by its name."""
    method, eps = algorithm.advantage, algorithm.advantage_eps
    scales: dict[str, tuple[float, float]] = {}
    if method == "reinforce_pp" and statistics:
        mean, std = batch_moments(statistics)
        return {one.name: (mean, std + eps) for one in statistics}
    for key, group in _grouped(statistics, by="role" if method == "ema" else "group").items():
        means_G = [one.mean for one in group]
        divisor = 1.0
        if method == "ema":
            # Only earlier steps' rewards, because this step's would bias the gradient; the first
            # step has no others.
            start = baselines[key] if key in baselines else sum(means_G) / len(means_G)
            baselines_G = [start] * len(group)
        elif method == "rloo":
            baselines_G = leave_one_out(means_G)
        elif method in ("grpo", "dr_grpo"):
            # The group's mean (arXiv 2402.03300, section 4.1.2).
            baselines_G = [sum(means_G) / len(means_G)] * len(means_G)
        else:
            raise ValueError(f"algorithm.advantage {method} has no baseline in {__name__}")
        if method == "grpo":
            divisor = group_std(group) + eps
        scales |= {one.name: (b, divisor) for one, b in zip(group, baselines_G, strict=True)}
    return scales


def group_std(group: Sequence[SampleStatistics]) -> float:
    """The population standard deviation of the group's returns. Every sample has equal weight,
    whatever its length."""
    mean = sum(one.mean for one in group) / len(group)
    squares = [(one.mean - mean) ** 2 + one.variance for one in group]
    return math.sqrt(sum(squares) / len(squares))


def leave_one_out(means_G: Sequence[float]) -> list[float]:
    """The mean of the other samples as each one's baseline (RLOO, arXiv 2402.14740).

    It does not depend on the sample itself, so the gradient stays unbiased. The only sample of a
    group is its own baseline.
    """
    if len(means_G) == 1:
        return list(means_G)
    total = sum(means_G)
    return [(total - mean) / (len(means_G) - 1) for mean in means_G]


def batch_moments(batch: Sequence[SampleStatistics]) -> tuple[float, float]:
    """Mean and standard deviation of the returns of all tokens of a batch, with equal weight for
    every token (REINFORCE++, arXiv 2501.03262, global advantage normalization)."""
    num_tokens = sum(one.num_tokens for one in batch)
    mean = sum(one.num_tokens * one.mean for one in batch) / num_tokens
    squares = [one.num_tokens * ((one.mean - mean) ** 2 + one.variance) for one in batch]
    return mean, math.sqrt(sum(squares) / num_tokens)


def updated_baselines(
    baselines: Mapping[str, float],
    statistics: Sequence[SampleStatistics],
    *,
    algorithm: AlgorithmConfig,
) -> dict[str, float]:
    """Each role's moving average after a step, EMA_DECAY * old + (1 - EMA_DECAY) * mean, at first
    the mean itself; {} unless the method is ema (role-conditioned advantage estimation, SPIRAL,
    arXiv 2506.24119)."""
    if algorithm.advantage != "ema":
        return {}
    updated = dict(baselines)
    for role, samples in _grouped(statistics, by="role").items():
        mean = sum(one.mean for one in samples) / len(samples)
        old = baselines.get(role)
        updated[role] = mean if old is None else EMA_DECAY * old + (1.0 - EMA_DECAY) * mean
    return updated


# --- advantages from a critic, and of teachers ----------------------------------------------------


def gae(rewards_K: Sequence[float], values_K: Sequence[float], *, lam: float) -> list[float]:
    """Generalized advantage estimation over one transcript, arXiv 1506.02438 eq. 16 with gamma 1.

    One time step is one sampled token. With d_k = r_k + V_{k+1} - V_k, the advantage is the sum
    over l of lam^l d_{k+l}. `values_K` are the values of the states before each token. The state
    after the last token has value 0, because the game is over. Tokens of the other seat and of the
    game are not steps: the next value is conditioned on them, but lam does not decay over them.
    """
    advantages_K = [0.0] * len(values_K)
    advantage, next_value = 0.0, 0.0
    for k in reversed(range(len(values_K))):
        delta = rewards_K[k] + next_value - values_K[k]
        advantage = delta + lam * advantage
        advantages_K[k] = advantage
        next_value = values_K[k]
    return advantages_K


def with_gae(sample: Sample, values: Sequence[float], *, lam: float) -> Sample:
    """The sample with advantages, the critic's values and the critic's targets.

    `values` has one entry per token and is read where the mask is 1. A value's target is the
    lambda-return, advantage + value.
    """
    indices, rewards = [i for i, m in enumerate(sample.mask) if m], sample.token_rewards()
    advantages_K = gae([rewards[i] for i in indices], [values[i] for i in indices], lam=lam)
    advantages, returns = ([0.0] * len(sample.ids) for _ in range(2))
    for i, advantage in zip(indices, advantages_K, strict=True):
        advantages[i] = advantage
        returns[i] = advantage + values[i]
    return replace(sample, advantages=advantages, values=list(values), returns=returns)


def imitation_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Teachers' transcripts as samples: every token worth imitating has advantage 1."""
    return [
        replace(sample, advantages=[float(m) for m in sample.mask])
        for episode in episodes
        for seat in trained_seats(episode)
        for sample in [seat_sample(episode, seat)]
    ]


# --- helpers --------------------------------------------------------------------------------------


def _grouped(entries: Sequence[T], *, by: str) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for entry in entries:
        groups.setdefault(getattr(entry, by), []).append(entry)
    return groups


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population variance. The mean of equal values is exact, without a sum's rounding."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)
