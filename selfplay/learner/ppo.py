"""PPO's own part of a step: values of the rollout, advantages from them, and what is then learnt.

Shapes: K trained tokens of this rank's samples. Knows no games and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from selfplay.config import CriticConfig
from selfplay.credit.gae import with_gae
from selfplay.credit.sample import Sample
from selfplay.distributed import World, all_reduce_sum
from selfplay.learner.learner import Learner, UpdateSettings, batch_values
from selfplay.learner.objective import Part
from selfplay.learner.recompute import token_values

WHITE_EPS = 1e-8  # added to the variance, so that advantages that are all equal become 0


def estimate_values(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with values, returns and advantages, and how well the values foretold.

    Once a rollout, before any weight moves; every rank must call. `explained_variance` is
    1 - Var(return - value) / Var(return) and absent where all returns are equal.
    """
    critic, world = settings.critic, learner.world
    values = token_values(learner, samples, lambda b: batch_values(learner, b), settings=settings)
    judged = [
        with_gae(sample, of_sample, gamma=critic.gamma, lam=critic.lam)
        for sample, of_sample in zip(samples, values, strict=True)
    ]
    returns_K = [g for s in judged for g, m in zip(s.returns, s.mask, strict=True) if m]
    values_K = [v for s in judged for v, m in zip(s.values, s.mask, strict=True) if m]
    return_mean, return_variance = moments(returns_K, world)
    found = {"return_mean": return_mean}
    if return_variance > 0.0:
        errors_K = [g - v for g, v in zip(returns_K, values_K, strict=True)]
        found["explained_variance"] = 1.0 - moments(errors_K, world)[1] / return_variance
    return (whitened(judged, world) if critic.whiten else judged), found


def whitened(samples: Sequence[Sample], world: World) -> list[Sample]:
    """Advantages of mean 0 and variance 1 over the trained tokens of all ranks."""
    mean, variance = moments(
        [a for s in samples for a, m in zip(s.advantages, s.mask, strict=True) if m], world
    )
    scale = 1.0 / math.sqrt(variance + WHITE_EPS)
    return [
        replace(
            s,
            advantages=[
                (a - mean) * scale if m else 0.0 for a, m in zip(s.advantages, s.mask, strict=True)
            ],
        )
        for s in samples
    ]


def moments(values_K: Sequence[float], world: World) -> tuple[float, float]:
    """Mean and variance over all ranks; 0 and 0 of nothing."""
    total, count = all_reduce_sum([sum(values_K), float(len(values_K))], world)
    mean = total / max(1.0, count)
    squares = all_reduce_sum([sum((value - mean) ** 2 for value in values_K)], world)[0]
    return mean, squares / max(1.0, count)


def with_values(
    parts: Sequence[Part], samples: Sequence[Sample], *, step: int, critic: CriticConfig
) -> list[Part]:
    """The parts of an optimizer step and the value loss of its samples; during the critic's warm-up
    the value loss alone, so that the policy stays as it is."""
    values = Part(samples, "value", weight=critic.coefficient)
    return [values] if step < critic.warmup_steps else [*parts, values]
