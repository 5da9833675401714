"""The reference that a policy is held to: how hard it pulls, and when it becomes the policy.

Knows no games and no text.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from selfplay.config import AlgorithmConfig
from selfplay.learner.learner import Learner


def adapted_kl_weight(weight: float, measured: float, *, target: float, horizon: float) -> float:
    """The next step's weight of the divergence: weight * (1 + clip(measured / target - 1, -0.2,
    0.2) / horizon).

    Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), whose K of 0.1 is a horizon of 10 steps.
    Divergences are in nats a token here, in nats a sequence there.
    """
    error = max(-0.2, min(0.2, measured / target - 1.0))
    return weight * (1.0 + error / horizon)


def update_reference(
    learner: Learner, learnt: Mapping[str, float], *, step: int, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """After a step's updates: steer the weight of the divergence, and let the reference become the
    policy where the settings ask for it. Returns the weight that this step used, if it can move.

    A step that measured no divergence, because nothing was trained, leaves the weight.
    """
    used = learner.kl
    if algorithm.kl_target and "kl_reference" in learnt:
        learner.kl = adapted_kl_weight(
            used,
            learnt["kl_reference"],
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
        for held, moving in zip(
            learner.reference.parameters(), learner.model.parameters(), strict=True
        ):
            held.copy_(moving)
