"""From episodes to samples in two steps: what each sample earned, then how that compares.

A group is (instance, seat), and the partner where there is one, or the turns tried from one state.
The two seats of one game are never each other's baseline: they share a reward, so that advantage
would be exactly zero. Between the two steps a trainer may add to the rewards. Floats only; no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress

from selfplay.config import AlgorithmConfig, RewardConfig
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
from selfplay.rollout.episode import Episode

ZERO_VARIANCE = 1e-9  # values of a group that differ by less carry no signal
# Methods whose baseline is the group's own: a flat group has no gradient, so it is dropped. For the
# others it has one: a group that always wins is better than the batch or the average.
COMPARED_IN_GROUPS = ("grpo", "dr_grpo", "rloo")


@dataclass(frozen=True, slots=True)
class CreditStats:
    """How many groups a step had and how many of them carried no signal within themselves; those of
    branch points are counted apart."""

    num_groups: int
    num_zero_variance_groups: int
    num_branch_groups: int = 0
    num_zero_variance_branch_groups: int = 0
    spreads: dict[str, float] = field(default_factory=dict)  # of each instance
    parts: dict[str, float] = field(default_factory=dict)  # of the reward, summed over games


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What the others, on whatever rank, must know of a sample to be compared with it: its trained
    tokens' number, the mean of their values, and their variance within the sample."""

    name: str
    group: str
    role: str
    num_tokens: int
    mean: float
    within: float


def reward_samples(
    episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, reward: RewardConfig
) -> tuple[list[Sample], CreditStats]:
    """Samples with their rewards and without advantages; flat groups are left out where the method
    compares within groups."""
    games = _groups(episode_samples(episodes, algorithm=algorithm, reward=reward))
    turns = _groups(branch_samples(episodes, algorithm=algorithm, reward=reward))
    groups = games | turns
    # A critic compares with what it expected: no group is flat for it.
    judged = algorithm.method == "ppo"
    flat = {name for name, members in groups.items() if not judged and _has_zero_variance(members)}
    dropped = flat if algorithm.method in COMPARED_IN_GROUPS else set()
    samples = [s for name, members in groups.items() if name not in dropped for s in members]
    return samples, CreditStats(
        num_groups=len(games),
        num_zero_variance_groups=len(flat & games.keys()),
        num_branch_groups=len(turns),
        num_zero_variance_branch_groups=len(flat & turns.keys()),
        spreads=_reward_stds(episodes, reward=reward),
        parts=part_sums(episodes, config=reward),
    )


def sample_statistics(
    samples: Sequence[Sample], *, algorithm: AlgorithmConfig
) -> list[SampleStatistics]:
    """What the ranks tell each other before advantages are assigned."""
    found = []
    for sample in samples:
        if sample.group:
            values_T = list(compress(_values(sample, algorithm), sample.mask))
            mean, within = _mean_and_variance(values_T)
            found.append(
                SampleStatistics(
                    sample.name, sample.group, sample.role, len(values_T), mean, within
                )
            )
    return found


def assign_advantages(
    samples: Sequence[Sample],
    *,
    algorithm: AlgorithmConfig,
    among: Sequence[Sequence[SampleStatistics]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> list[Sample]:
    """The samples with an advantage on every trained token: (value - baseline) / divisor.

    `among` holds the standings of every rank, for a group's samples may have been dealt to several;
    ranks that hold the same sample count once. Left out, these samples are all there are.
    `baselines` are ema's, by role, of the steps before. Samples without a group keep the advantages
    they have.
    """
    if algorithm.method == "ppo":
        return list(samples)  # its advantages need values, and come with them
    among = [sample_statistics(samples, algorithm=algorithm)] if among is None else among
    known = _once(among)
    against = _against(known, algorithm=algorithm, baselines=baselines or {})
    return [
        _compared(sample, *against[sample.name], algorithm=algorithm) if sample.group else sample
        for sample in samples
    ]


def updated_baselines(
    baselines: Mapping[str, float],
    among: Sequence[Sequence[SampleStatistics]],
    *,
    algorithm: AlgorithmConfig,
) -> dict[str, float]:
    """ema's baselines after a step: each role's moves towards its mean of this step. Other methods
    have none."""
    if algorithm.method != "ema":
        return {}
    means = {
        role: _average([s.mean for s in members])
        for role, members in _by(_once(among), "role").items()
    }
    moved = {
        role: moved_average(baselines.get(role), mean, decay=algorithm.ema_decay)
        for role, mean in means.items()
    }
    return {**baselines, **moved}


def imitation_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Teachers' transcripts as samples: every token worth imitating weighs 1."""
    return [
        replace(sample, advantages=[float(m) for m in sample.mask])
        for episode in episodes
        for seat in trained_seats(episode)
        for sample in [seat_sample(episode, seat)]
    ]


def _against(
    known: Sequence[SampleStatistics], *, algorithm: AlgorithmConfig, baselines: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Each sample's baseline and divisor, by its name."""
    method, found = algorithm.method, dict[str, tuple[float, float]]()
    if method == "reinforce_pp" and known:
        mean, std = batch_moments(
            [s.mean for s in known], [s.within for s in known], [s.num_tokens for s in known]
        )
        return {s.name: (mean, std + algorithm.advantage_eps) for s in known}
    for key, members in _by(known, "role" if method == "ema" else "group").items():
        means_G = [member.mean for member in members]
        divisor = 1.0
        if method == "ema":
            # Not moved yet: a baseline that knew this step's rewards would bias its gradient. The
            # first step has nothing else to compare with.
            start = baselines[key] if key in baselines else _average(means_G)
            baselines_G = [start] * len(members)
        elif method == "rloo":
            baselines_G = leave_one_out(means_G)
        else:
            baselines_G = group_mean(means_G)
        if method == "grpo":
            divisor = reward_std(means_G, [m.within for m in members]) + algorithm.advantage_eps
        found |= {m.name: (b, divisor) for m, b in zip(members, baselines_G, strict=True)}
    return found


def _compared(
    sample: Sample, baseline: float, divisor: float, *, algorithm: AlgorithmConfig
) -> Sample:
    values_N, advantages = _values(sample, algorithm), [0.0] * len(sample.mask)
    for start, end in trained_stretches(sample.mask):
        advantages[start:end] = [(value - baseline) / divisor for value in values_N[start:end]]
    return replace(sample, advantages=advantages)


def _values(sample: Sample, algorithm: AlgorithmConfig) -> list[float]:
    """What each token is credited with, one value a token: the sum of all rewards but the charges
    (reinforce_pp: of those from the token on), less the charge of the token's own turn."""
    rewards = list(sample.rewards) if sample.penalties else sample.rewards
    for _, end, penalty in sample.penalties:
        rewards[end - 1] += penalty
    if algorithm.method == "reinforce_pp":
        values_N = list(accumulate(reversed(rewards)))[::-1]
    else:
        values_N = [sum(rewards)] * len(rewards)
    for start, end, penalty in sample.penalties:
        values_N[start:end] = [value - penalty for value in values_N[start:end]]
    return values_N


def _once(among: Sequence[Sequence[SampleStatistics]]) -> list[SampleStatistics]:
    return list({statistics.name: statistics for part in among for statistics in part}.values())


def _by(known: Sequence[SampleStatistics], field: str) -> dict[str, list[SampleStatistics]]:
    found: dict[str, list[SampleStatistics]] = {}
    for statistics in known:
        found.setdefault(getattr(statistics, field), []).append(statistics)
    return found


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Equal values give their own value exactly, which a sum over tokens would not."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = _average(values)
    return mean, _average([(value - mean) ** 2 for value in values])


def _reward_stds(episodes: Sequence[Episode], *, reward: RewardConfig) -> dict[str, float]:
    """For each instance the standard deviation of what its episodes earned, of the role where it is
    largest: near 0 where it is too hard or learnt, large at the edge."""
    earned: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        for seat in trained_seats(episode):
            roles = earned.setdefault(episode.instance, {})
            roles.setdefault(role_of(episode, seat), []).append(
                seat_reward(episode, seat, config=reward)
            )
    return {
        instance: max(
            reward_std(rewards, [0.0] * len(rewards))
            if max(rewards) - min(rewards) > ZERO_VARIANCE
            else 0.0
            for rewards in roles.values()
        )
        for instance, roles in earned.items()
    }


def _groups(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return found


def _has_zero_variance(members: Sequence[Sample]) -> bool:
    """Whether nothing in the group was worth more than anything else in it."""
    earned = [sum(s.rewards) + sum(penalty for *_, penalty in s.penalties) for s in members]
    return max(earned) - min(earned) < ZERO_VARIANCE and not any(s.penalties for s in members)
