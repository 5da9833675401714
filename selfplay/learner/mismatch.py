"""How far the engine that spoke and the trainer that learns are apart, and what a token weighs.

The engine samples from its own probabilities; with other kernels, another precision or stale
weights they are not the trainer's. Log-probs in nats. M trained tokens of a micro-batch, T trained
tokens of one sample. Knows no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from selfplay.learner.loss import LARGEST_LOG


class EngineDisagrees(RuntimeError):
    """The engine does not speak with the trainer's weights; those of the trainer are sound."""


def mismatch_values(trainer_M: Tensor, engine_M: Tensor) -> dict[str, Tensor]:
    """Per token what `mismatch_metrics` takes the means of: the distance, Schulman's k3 of KL(engine ||
    trainer) as the engine's samples estimate it, and the importance weight with its square."""
    logs_M = (trainer_M - engine_M).detach()
    weights_M = logs_M.clamp(max=LARGEST_LOG).exp()
    return {
        "mismatch_mean": logs_M.abs(),
        "mismatch_kl": logs_M.clamp(max=LARGEST_LOG).expm1() - logs_M,
        "mismatch_weight": weights_M,
        "mismatch_weight_square": weights_M.square(),
    }


def mismatch_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """The means with the weights' two moments turned into `mismatch_ess`, the effective share of tokens:
    (mean of w)^2 / mean of w^2 (Kong 1992), 1 where engine and trainer agree."""
    metrics = dict(means)
    if "mismatch_weight" in metrics:
        mean, square = metrics.pop("mismatch_weight"), metrics.pop("mismatch_weight_square")
        metrics["mismatch_ess"] = mean * mean / square if square else 0.0
    return metrics


def importance_weights(
    log_ratios_T: Sequence[float], *, level: str, cap: float, low: float, high: float
) -> list[float]:
    """What each token's loss weighs, from its log pi_trainer - log pi_engine.

    w = exp(gap) a token, or with `level` "sequence" exp(sum of the gaps) for all of them, the
    exponent at most `LARGEST_LOG` (verl's bound, too). Weights
    below `low` or above `high` (0: no bound) are rejected: 0; what is left is truncated at `cap`
    (0: not at all). Truncated importance sampling: Ionides 2008, and Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"; rejection: "masked
    importance sampling" in the same line of work.
    """
    logs_T = [sum(log_ratios_T)] * len(log_ratios_T) if level == "sequence" else list(log_ratios_T)
    weights_T = [math.exp(min(log, LARGEST_LOG)) for log in logs_T]
    return [0.0 if w < low or (high and w > high) else min(w, cap) if cap else w for w in weights_T]
