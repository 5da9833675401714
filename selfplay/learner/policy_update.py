"""The policy update of one rollout: its epochs, mini-batches and optimizer steps; then the KL
weight and the reference.

Knows no games and no text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from selfplay.config import AlgorithmConfig
from selfplay.credit.sample import Sample
from selfplay.data.seeds import named_seed
from selfplay.learner.learner import Learner, UpdateSettings
from selfplay.learner.objective import Part
from selfplay.learner.optimizer import self_play_rate
from selfplay.learner.optimizer_step import NonFinite, optimizer_step
from selfplay.learner.ppo import estimate_values, with_values
from selfplay.learner.recompute import check_mismatch

MISMATCH = ("mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_ess")


def update_policy(
    learner: Learner,
    samples: Sequence[Sample],
    auxiliary: Sequence[Part],
    *,
    step: int,
    settings: UpdateSettings,
) -> tuple[dict[str, float], list[str]]:
    """All optimizer steps of one rollout: `epochs` passes, each split into `minibatches` by a
    shuffle with a named seed.

    Returns metrics averaged over the optimizer steps, and why steps were skipped (a loss or
    gradient that is not finite). The log-prob mismatch is measured in the first step, before any
    weight changes. Above `settings.max_mismatch` it raises EngineDisagrees and no weight changes.
    """
    algorithm = settings.algorithm
    value_metrics: dict[str, float] = {}
    if learner.critic is not None:
        samples, value_metrics = estimate_values(learner, samples, settings=settings)
    per_step, skipped = list[dict[str, float]](), list[str]()

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
            try:
                metrics = optimizer_step(
                    learner, parts, lr=lr, settings=settings, before_step=check
                )
            except NonFinite as error:
                skipped.append(str(error))
            else:
                if metrics:
                    per_step.append(metrics)
    means = {}
    for name in sorted({name for metrics in per_step for name in metrics}):
        values = [metrics[name] for metrics in per_step if name in metrics]
        means[name] = sum(values) / len(values)
    first = {
        name: metrics[name] for metrics in per_step[:1] for name in MISMATCH if name in metrics
    }
    num_tokens = sum(metrics["num_trained_tokens"] for metrics in per_step)
    counts = {
        "num_trained_tokens": num_tokens / algorithm.epochs,
        "num_optimizer_steps": float(len(per_step)),
    }
    if skipped:
        counts["num_skipped_steps"] = float(len(skipped))
    return {**means, **first, **value_metrics, **counts}, skipped


def adapted_kl_weight(weight: float, measured: float, *, target: float, horizon: float) -> float:
    """The next step's KL weight: weight * (1 + clip(measured / target - 1, -0.2, 0.2) / horizon).

    Ziegler et al. 2019 (arXiv 1909.08593, section 2.2); their K of 0.1 is a horizon of 10 steps.
    The KL here is in nats per token, theirs in nats per sequence.
    """
    error = max(-0.2, min(0.2, measured / target - 1.0))
    return weight * (1.0 + error / horizon)


def update_reference(
    learner: Learner, metrics: Mapping[str, float], *, step: int, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Adapt the KL weight and copy the policy to the reference after an update, if so configured.

    `metrics` are the step's; a step that trained nothing has no `kl_reference` and keeps the
    weight. Returns the weight that this step used as `kl_weight`, if a controller adapts it.
    """
    used = learner.kl
    if algorithm.kl_target and "kl_reference" in metrics:
        learner.kl = adapted_kl_weight(
            used,
            metrics["kl_reference"],
            target=algorithm.kl_target,
            horizon=algorithm.kl_horizon,
        )
    if algorithm.reference_every and (step + 1) % algorithm.reference_every == 0:
        copy_policy_to_reference(learner)
    return {"kl_weight": used} if algorithm.kl_target else {}


def copy_policy_to_reference(learner: Learner) -> None:
    """Copy the policy's weights into the reference, shard by shard."""
    assert learner.reference is not None
    with torch.no_grad():
        for target, source in zip(
            learner.reference.parameters(), learner.model.parameters(), strict=True
        ):
            target.copy_(source)
