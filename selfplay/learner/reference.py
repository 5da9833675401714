"""The reference during a run: the controller of the KL weight, and updates of the reference.

Knows no games and no text.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selfplay.config import AlgorithmConfig
from selfplay.learner.learner import Learner


def adapted_kl_weight(weight: float, measured: float, *, target: float, horizon: float) -> float:
    """The next step's KL weight: weight * (1 + clip(measured / target - 1, -0.2, 0.2) / horizon).

    Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), whose K of 0.1 is a horizon of 10 steps.
    The KL is in nats a token here, in nats a sequence there.
    """
    error = max(-0.2, min(0.2, measured / target - 1.0))
    return weight * (1.0 + error / horizon)


def update_reference(
    learner: Learner, metrics: Mapping[str, float], *, step: int, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """After a step's update: adapt the KL weight and copy the policy to the reference, where set.

    `metrics` are the step's; one that trained nothing has no `kl_reference` and keeps the weight.
    Returns the weight that this step used as `kl_weight`, if a controller adapts it.
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
    """The reference takes the policy's weights, shard by shard."""
    assert learner.reference is not None
    with torch.no_grad():
        for target, source in zip(
            learner.reference.parameters(), learner.model.parameters(), strict=True
        ):
            target.copy_(source)
