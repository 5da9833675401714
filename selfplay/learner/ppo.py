"""PPO's advantages: the critic's values of a rollout, GAE, whitening.

Shapes: K trained tokens of this rank's samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from selfplay.advantages.advantages import with_gae
from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.distributed import World, all_reduce_sum
from selfplay.learner.learner import Learner, batch_values
from selfplay.learner.rescore import token_values

WHITE_EPS = 1e-8  # added to the variance, so that equal advantages become 0


def estimate_values(
    learner: Learner, samples: Sequence[Sample], *, config: Config
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with values, returns and advantages (GAE), and metrics of the values.

    Every rank must call it once per rollout, before any weight changes. `explained_variance` is
    1 - Var(return - value) / Var(return); it is missing if all returns are equal.
    """
    world = learner.world
    values = token_values(learner, samples, lambda b: batch_values(learner, b), config=config)
    valued = [
        with_gae(sample, of_sample, lam=config.critic.lam)
        for sample, of_sample in zip(samples, values, strict=True)
    ]
    returns_K = [g for s in valued for g, m in zip(s.returns, s.mask, strict=True) if m]
    values_K = [v for s in valued for v, m in zip(s.values, s.mask, strict=True) if m]
    return_mean, return_variance = moments(returns_K, world)
    metrics = {"return_mean": return_mean}
    if return_variance > 0.0:
        errors_K = [g - v for g, v in zip(returns_K, values_K, strict=True)]
        metrics["explained_variance"] = 1.0 - moments(errors_K, world)[1] / return_variance
    return whitened(valued, world), metrics


def whitened(samples: Sequence[Sample], world: World) -> list[Sample]:
    """The samples with advantages of mean 0 and variance 1 over the trained tokens of all ranks."""
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
    """Mean and variance over all ranks; 0 and 0 without any value."""
    total, count = all_reduce_sum([sum(values_K), float(len(values_K))], world)
    mean = total / max(1.0, count)
    squares = all_reduce_sum([sum((value - mean) ** 2 for value in values_K)], world)[0]
    return mean, squares / max(1.0, count)
