"""From samples with rewards to samples with advantages, by group statistics over all ranks.

A group is (instance, seat, partner), or the sibling turns of one state. The two seats of one game
are never each other's baseline: if they share a reward, their advantages would be zero.

Shapes: G samples of a group, B samples of a batch, T tokens of a sample, K of them trained.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from dialop.game import LARGEST, all_usable
from selfplay.advantages.branches import branch_samples
from selfplay.advantages.rewards import (
    episode_samples,
    legal_mask,
    seat_sample,
    trained_seats,
)
from selfplay.advantages.sample import Sample, trained_stretches
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.config.plugins import PLUGINS, function_of, own_call
from selfplay.distributed import (
    World,
    broadcast_object,
    check_switches,
    gather_objects,
    raise_on_all_ranks,
    torch_switches,
)
from selfplay.errors import OwnFault
from selfplay.rollout.episode import Episode

T = TypeVar("T")
ZERO_VARIANCE = 1e-9  # a group has zero variance if its returns' standard deviation is smaller
EMA_DECAY = 0.8  # a step's weight in the moving average of `ema` is 1 - EMA_DECAY


@dataclass(frozen=True, slots=True)
class CreditStats:
    """How many groups a step had and how many of them had zero variance; groups of branch points
    are counted separately. `rewards` holds (total reward, mean return of a sampled token) of each
    seat's game by its sample's name, including dropped groups and turns at branch points."""

    num_groups: int = 0
    num_zero_variance_groups: int = 0
    num_branch_groups: int = 0
    num_zero_variance_branch_groups: int = 0
    rewards: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: CreditStats) -> CreditStats:
        """The statistics of both."""
        names = [each.name for each in fields(self) if each.name != "rewards"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return CreditStats(**sums, rewards=self.rewards | other.rewards)


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """The inputs of baselines: the number of a sample's trained tokens, and the mean and variance
    of their returns. If one reward covers the full episode, the variance is 0. `turns` holds the
    mean return of each trained turn."""

    name: str
    group: str
    seating: str
    num_tokens: int
    mean: float
    variance: float
    turns: tuple[float, ...] = ()


Statistics = Sequence[SampleStatistics]  # of all samples of a step, over all ranks
# Each sample's baseline (or one per turn) and divisor: a token's advantage is
# (its return - baseline) / divisor. None drops a sample.
Scales = list[tuple[float | Sequence[float], float] | None]
_Checked = tuple[tuple[float, ...], float] | None  # the baseline of each turn and the divisor


def reward_samples(
    episodes: Sequence[Episode],
    *,
    algorithm: AlgorithmConfig,
    reward: RewardConfig,
    policy: str | None = None,
) -> tuple[list[Sample], CreditStats]:
    """Samples with rewards and without advantages, of the policy of this name or of all."""

    def own(sample: Sample) -> bool:
        return policy in (None, sample.policy)

    games = grouped(filter(own, episode_samples(episodes, reward=reward)), attrgetter("group"))
    turns, whole = dict[str, list[Sample]](), games
    if any(episode.branches for episode in episodes):
        turns = grouped(filter(own, branch_samples(episodes, reward=reward)), attrgetter("group"))
        played = [replace(episode, branches=()) for episode in episodes]
        whole = grouped(filter(own, episode_samples(played, reward=reward)), attrgetter("group"))
    groups = games | turns
    statistics = {name: sample_statistics(group) for name, group in groups.items()}
    of_seats = {n: sample_statistics(of) for n, of in whole.items()} if turns else statistics
    rewards = {
        sample.name: (sample.total_reward, one.mean)
        for name, group in whole.items()
        for sample, one in zip(group, of_seats[name], strict=True)
    }
    deviation = turn_std if algorithm.advantage == "turns" else group_std
    # With a critic the baseline is the critic's estimate, so no group counts as zero-variance.
    critic = algorithm.advantage == "ppo"
    zero_variance = {
        name
        for name, group in statistics.items()
        if not critic and deviation(group) < ZERO_VARIANCE
    }
    samples = [sample for group in groups.values() for sample in group]
    return samples, CreditStats(
        num_groups=len(games),
        num_zero_variance_groups=len(zero_variance & games.keys()),
        num_branch_groups=len(turns),
        num_zero_variance_branch_groups=len(zero_variance & turns.keys()),
        rewards=rewards,
    )


def compute_advantages(
    samples: Sequence[Sample],
    state: Mapping[str, float],
    *,
    algorithm: AlgorithmConfig,
    world: World,
) -> tuple[list[Sample], dict[str, float]]:
    """This rank's samples with advantages, without those that `algorithm.advantage` drops, and its
    next state, such as moving averages, equal on every rank. Samples without a group keep their
    advantages.

    Every rank must call: a group may span ranks. All use the result of rank 0. Raises OwnFault, on
    every rank, if a custom advantage fails."""
    by_rank = gather_objects(sample_statistics(samples), world)
    # A sample that several ranks hold counts once.
    statistics = list({one.name: one for of_rank in by_rank for one in of_rank}.values())
    if not statistics:
        return list(samples), dict(state)
    key, name, state = "algorithm.advantage", algorithm.advantage, dict(state)
    with raise_on_all_ranks(world), own_call(key, name):
        scales = checked_scales(function_of(key, name), statistics, state, algorithm)
        if name not in PLUGINS[key].built_in and world.rank == 0 and _all_zero(statistics, scales):
            print(
                f"warning: {key} {name}: every advantage is 0 although rewards differ, so they "
                "train nothing in this step",
                file=sys.stderr,
            )
    scales, state = broadcast_object((scales, state), world)
    scale_of = {one.name: scale for one, scale in zip(statistics, scales, strict=True)}
    with_advantages = []
    for sample in samples:
        if not sample.group:
            with_advantages.append(sample)
        elif (scale := scale_of[sample.name]) is not None:
            with_advantages.append(_with_advantages(sample, *scale))
    return with_advantages, state


def checked_scales(
    advantage: Callable[..., Any],
    samples: Statistics,
    state: dict[str, float],
    algorithm: AlgorithmConfig,
) -> list[_Checked]:
    """The checked result of an advantage function: each sample's baseline per turn and divisor,
    None for one it drops. It may change `state`. Raises OwnFault for an unusable result."""
    given = [replace(one) for one in samples]
    switches, result = torch_switches(), advantage(given, state, algorithm)
    check_switches(switches)
    if given != list(samples):
        raise OwnFault("it must not change samples")
    scales = [*result] if isinstance(result, Iterable) else []
    pairs = all(s is None or (isinstance(s, Sequence) and len(s) == 2) for s in scales)
    if not pairs or len(scales) != len(samples):
        raise OwnFault(
            f"it must return (baseline, divisor) for each of {len(samples)} samples, got "
            f"{result!r:.300}, of {len(scales)}; None leaves a sample out"
        )
    plain = all(isinstance(k, str) and type(v) in (int, float) for k, v in state.items())
    if not (plain and all_usable([*state.values()])):
        raise OwnFault(
            f"its state must be numbers by name, none NaN or beyond {LARGEST:g}, got {state!r:.300}"
        )
    found: list[_Checked] = []
    for one, scale in zip(samples, scales, strict=True):
        if scale is None:
            found.append(None)
            continue
        (baseline, divisor), num_turns = scale, len(one.turns)
        baselines = baseline if isinstance(baseline, Sequence) else [baseline] * num_turns
        try:
            of_turns, by = tuple(map(float, baselines)), float(divisor)
            sizes = [(mean - b) / by for mean, b in zip(one.turns, of_turns, strict=True)]
        except (TypeError, ValueError, ArithmeticError):
            sizes = [math.nan]
        if not (all_usable(sizes) and all_usable(of_turns) and 0 < by < math.inf):
            raise OwnFault(
                f"baselines must be finite, one for all turns or for each of {num_turns}, and "
                f"divisors above 0, got {baseline} and {divisor} in a group of "
                f"{sum(other.group == one.group for other in samples)} ({one.name}); no advantage "
                f"may be beyond {LARGEST:g}"
            )
        found.append((of_turns, by))
    return found


def _all_zero(statistics: Statistics, scales: Sequence[_Checked]) -> bool:
    """Whether rewards differ in a group, yet in float32 every turn's advantage is 0."""
    kept = [(one, *scale) for one, scale in zip(statistics, scales, strict=True) if scale]
    sizes = (abs(g - b) / by for one, of, by in kept for g, b in zip(one.turns, of, strict=True))
    groups = grouped([one for one, *_ in kept], attrgetter("group")).values()
    differ = any(group_std(group) >= ZERO_VARIANCE for group in groups)
    return differ and max(sizes) < 2.0**-126


def _with_advantages(sample: Sample, baselines: Sequence[float], divisor: float) -> Sample:
    """The sample with (return - baseline) / divisor on every trained token."""
    returns_T, advantages_T = sample.returns, [0.0] * len(sample.ids)
    for turn, (start, end) in enumerate(trained_stretches(sample.mask)):
        advantages_T[start:end] = [(g - baselines[turn]) / divisor for g in returns_T[start:end]]
    return replace(sample, advantages=advantages_T)


def sample_statistics(samples: Sequence[Sample]) -> list[SampleStatistics]:
    """The statistics of every sample that belongs to a group."""
    statistics = []
    for sample in samples:
        if sample.group:
            returns_K = list(compress(sample.returns, sample.mask))
            mean, variance = _mean_and_variance(returns_K)
            turns = [sample.returns[start:end] for start, end in trained_stretches(sample.mask)]
            statistics.append(
                SampleStatistics(
                    name=sample.name,
                    group=sample.group,
                    seating=sample.seating,
                    num_tokens=len(returns_K),
                    mean=mean,
                    variance=variance,
                    turns=tuple(_mean_and_variance(turn)[0] for turn in turns),
                )
            )
    return statistics


# --- baselines and divisors: functions for `algorithm.advantage` ----------------------------------


def grpo(samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig) -> Scales:
    """The group's mean and standard deviation (arXiv 2402.03300, section 4.1.2)."""
    return _per_group(
        samples,
        lambda group: [(_mean(group), group_std(group) + algorithm.advantage_eps)] * len(group),
    )


def dr_grpo(samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig) -> Scales:
    """The group's mean (Dr. GRPO, arXiv 2503.20783)."""
    return _per_group(samples, lambda group: [(_mean(group), 1.0)] * len(group))


def rloo(samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig) -> Scales:
    """The mean of the other samples of the group (RLOO, arXiv 2402.14740)."""
    return _per_group(
        samples, lambda group: [(b, 1.0) for b in leave_one_out([one.mean for one in group])]
    )


def turns(samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig) -> Scales:
    """The mean of each turn over the other samples of the group; the turns' deviation from it,
    which scales each group's gradient separately, like the deviation of `grpo`."""

    def scales(group: list[SampleStatistics]) -> Scales:
        divisor = turn_std(group) + algorithm.advantage_eps
        return [(turn_baselines(group, i), divisor) for i in range(len(group))]

    return _per_group(samples, scales, deviation=turn_std)


def turn_baselines(group: Statistics, index: int) -> tuple[float, ...]:
    """A baseline for each turn of a sample: the mean return of this turn over the group's other
    samples, or the mean of these samples if none has that turn.

    A turn's baseline does not depend on the sample itself, so the gradient stays unbiased; the
    divisor of `turns` does depend on it and gives groups with little deviation more weight. With
    the sample included, a turn that n samples reach would train at (n - 1) / n of its weight: a
    late turn, reached by few games, less than an early one, and one reached by a single game not at
    all.
    """
    others = [one for i, one in enumerate(group) if i != index] or group
    baselines = []
    for turn in range(len(group[index].turns)):
        same = [one.turns[turn] for one in others if len(one.turns) > turn]
        baselines.append(sum(same) / len(same) if same else _mean(others))
    return tuple(baselines)


def turn_std(group: Statistics) -> float:
    """The root mean square of the turns' returns around their baselines. Every sample has equal
    weight, whatever its number of turns; differences between turns are ignored."""
    gaps = [
        [value - baseline for value, baseline in zip(one.turns, baselines, strict=True)]
        for i, one in enumerate(group)
        for baselines in [turn_baselines(group, i)]
    ]
    squares = [sum(gap * gap for gap in of) / len(of) for of in gaps if of]
    return math.sqrt(sum(squares) / len(squares))


def reinforce_pp(
    samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig
) -> Scales:
    """The batch's mean and standard deviation over tokens (REINFORCE++, arXiv 2501.03262)."""
    mean, std = batch_moments(samples)
    return [(mean, std + algorithm.advantage_eps)] * len(samples)


def ema(samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig) -> Scales:
    """The moving average of each (seat, partner) pair (role-conditioned advantage, SPIRAL, arXiv
    2506.24119).

    The baselines come from earlier steps only, because this step's rewards would bias the gradient;
    only the first step has no others. The averages are the state: EMA_DECAY * old +
    (1 - EMA_DECAY) * mean, starting at the mean itself.
    """
    baselines = {}
    for seating, same in grouped(samples, attrgetter("seating")).items():
        mean = _mean(same)
        baselines[seating] = old = state.get(seating, mean)
        state[seating] = EMA_DECAY * old + (1.0 - EMA_DECAY) * mean if seating in state else mean
    return [(baselines[one.seating], 1.0) for one in samples]


def ppo(samples: Statistics, state: dict[str, float], algorithm: AlgorithmConfig) -> Scales:
    """No baseline: the update computes advantages from the critic's values (`methods/ppo.py`)."""
    return [(0.0, 1.0)] * len(samples)


def _mean(group: Statistics) -> float:
    return sum(one.mean for one in group) / len(group)


def group_std(group: Statistics) -> float:
    """The population standard deviation of the group's returns. Every sample has equal weight,
    whatever its length."""
    mean = _mean(group)
    squares = [(one.mean - mean) ** 2 + one.variance for one in group]
    return math.sqrt(sum(squares) / len(squares))


def _per_group(
    samples: Statistics,
    scales_of: Callable[[list[SampleStatistics]], Scales],
    *,
    deviation: Callable[[Statistics], float] = group_std,
) -> Scales:
    """Each sample's baseline and divisor, computed group by group with `scales_of`; None in a group
    whose `deviation` is 0, which has no gradient."""
    scales: dict[str, tuple[float | Sequence[float], float] | None] = {}
    for group in grouped(samples, attrgetter("group")).values():
        equal = deviation(group) < ZERO_VARIANCE
        of_group = [None] * len(group) if equal else scales_of(group)
        scales |= {one.name: scale for one, scale in zip(group, of_group, strict=True)}
    return [scales[one.name] for one in samples]


def leave_one_out(means_G: Sequence[float]) -> list[float]:
    """The mean of the other samples as each one's baseline.

    It does not depend on the sample itself, so the gradient stays unbiased. The only sample of a
    group is its own baseline. (r - baseline) is G / (G - 1) times (r - group mean) if all of a
    sample's returns are equal, as they are without rewards for single moves.
    """
    if len(means_G) == 1:
        return list(means_G)
    total = sum(means_G)
    return [(total - mean) / (len(means_G) - 1) for mean in means_G]


def batch_moments(batch: Statistics) -> tuple[float, float]:
    """Mean and standard deviation of the returns of all tokens of a batch; every token has equal
    weight."""
    num_tokens = sum(one.num_tokens for one in batch)
    mean = sum(one.num_tokens * one.mean for one in batch) / num_tokens
    squares = [one.num_tokens * ((one.mean - mean) ** 2 + one.variance) for one in batch]
    return mean, math.sqrt(sum(squares) / num_tokens)


# --- samples to imitate ---------------------------------------------------------------------------


def imitation_samples(episodes: Sequence[Episode], *, policy: str | None = None) -> list[Sample]:
    """The seats' transcripts as samples to imitate, without invalid moves: of the policy of this
    name or of all."""
    return [
        imitated(sample.name, sample.ids, mask, sample.starts)
        for episode in episodes
        for seat in trained_seats(episode)
        for sample in [seat_sample(episode, seat)]
        if policy in (None, sample.policy) and 1 in (mask := legal_mask(episode, seat))
    ]


def imitated(name: str, ids: Sequence[int], mask: Sequence[int], starts: Sequence[int]) -> Sample:
    """A sample to imitate: every token of the mask has advantage 1. Arrays are packed faster and
    take less than half of the memory of lists; a warm start has hundreds of thousands of them."""
    flags = bytes(mask)
    values = array("f", np.frombuffer(flags, np.uint8).astype(np.float32).tobytes())
    ids = array("q", np.asarray(ids, np.int64).tobytes())
    return Sample(name, ids, flags, (), values, starts=tuple(starts))


# --- helpers --------------------------------------------------------------------------------------


def grouped(entries: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population variance. The mean of equal values is exact, without a sum's rounding."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)
