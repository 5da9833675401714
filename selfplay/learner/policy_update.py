"""The policy update of one rollout: its epochs, mini-batches and optimizer steps.

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
from selfplay.learner.optimizer_step import NonFinite, optimizer_step
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
    """All optimizer steps of one rollout: `epochs` passes, each split into `minibatches` by a
    shuffle with a named seed.

    Returns metrics averaged over the optimizer steps. The log-prob mismatch is that of the first
    step, before any weight moved. If it is above `engine.max_mismatch`, raises EngineDisagrees and
    leaves all weights unchanged. An optimizer step whose loss or gradient is not finite is not
    taken; `learner.not_taken` gets its cause.
    """
    algorithm, world = settings.algorithm, learner.world
    value_metrics: dict[str, float] = {}
    if learner.critic is not None:
        samples, value_metrics = estimate_values(learner, samples, settings=settings)
    per_step: list[dict[str, float]] = []

    def check_engine(metrics: Mapping[str, float]) -> None:
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
            check = None if per_step else check_engine
            draw = (settings.seed, step, len(per_step))
            with named_dropout(*draw, config=settings.lora, world=world):
                try:
                    per_step.append(
                        optimizer_step(learner, parts, lr=lr, settings=settings, before_step=check)
                    )
                except NonFinite as error:
                    learner.not_taken.append(str(error))
    means = {}
    for name in sorted({name for metrics in per_step for name in metrics}):
        values = [metrics[name] for metrics in per_step if name in metrics]
        means[name] = sum(values) / len(values)
    first = {
        name: metrics[name] for metrics in per_step[:1] for name in MISMATCH if name in metrics
    }
    counts = {"num_optimizer_steps": float(len(per_step))}
    if learner.not_taken:
        counts["num_skipped_steps"] = float(len(learner.not_taken))
    return {"num_trained_tokens": 0.0, **means, **first, **value_metrics, **counts}
