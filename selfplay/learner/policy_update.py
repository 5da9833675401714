"""All that is learnt from one rollout: its passes and optimizer steps.

Knows no games and no text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.credit.sample import Sample
from selfplay.data.seeds import named_seed
from selfplay.learner.learner import Learner, UpdateSettings
from selfplay.learner.objective import Part
from selfplay.learner.optimizer import self_play_rate
from selfplay.learner.optimizer_step import optimizer_step
from selfplay.learner.ppo import estimate_values, with_values
from selfplay.learner.recompute import check_mismatch
from selfplay.model.lora import named_dropout

MISMATCH = ("mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_ess")


def update_policy(
    learner: Learner,
    samples: Sequence[Sample],
    auxiliary: Sequence[Part],
    *,
    step: int,
    settings: UpdateSettings,
) -> dict[str, float]:
    """All optimizer steps of one rollout: `epochs` passes, each cut into `minibatches` by a named
    shuffle.

    Returns metrics averaged over the optimizer steps; the gap to the engine is that of the first,
    before any weight moved. Raises EngineDisagrees then, with all weights as they were, when the
    engine did not speak with them.
    """
    algorithm, world = settings.algorithm, learner.world
    judged: dict[str, float] = {}
    if learner.critic is not None:
        samples, judged = estimate_values(learner, samples, settings=settings)
    seen: list[dict[str, float]] = []

    def in_agreement(metrics: Mapping[str, float]) -> None:
        check_mismatch(metrics, settings.max_mismatch)

    for epoch in range(algorithm.epochs):
        order = list(range(len(samples)))
        if algorithm.minibatches > 1:
            random.Random(named_seed(settings.seed, "minibatches", step, epoch)).shuffle(order)
        for place in range(algorithm.minibatches):
            share = [samples[i] for i in order[place :: algorithm.minibatches]]
            parts = [Part(share, "surrogate"), *auxiliary]
            if learner.critic is not None:
                parts = with_values(parts, share, step=step, critic=settings.critic)
            lr = self_play_rate(step, settings.optim, num_steps=settings.num_steps)
            check = None if seen else in_agreement
            draw = (settings.seed, step, len(seen))
            with named_dropout(*draw, config=settings.lora, world=world):
                one = optimizer_step(learner, parts, lr=lr, settings=settings, before_step=check)
            seen.append(one)
    names = {name for metrics in seen for name in metrics}
    means = {}
    for name in sorted(names):
        values = [metrics[name] for metrics in seen if name in metrics]
        means[name] = sum(values) / len(values)
    first = {name: seen[0][name] for name in MISMATCH if name in seen[0]}
    return {**means, **first, **judged, "num_optimizer_steps": float(len(seen))}
