"""The log-prob mismatch of engine and trainer, and the importance weights that correct for it.

The engine samples from its own probabilities. With other kernels, another precision or stale
weights they differ from the trainer's. Log-probs in nats. Shapes: M trained tokens of a
micro-batch, T trained tokens of one sample. Knows no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from selfplay.errors import RunEnds
from selfplay.learner.loss import LARGEST_LOG


class EngineDisagrees(RunEnds):
    """The engine's weights or log-probs are not the trainer's; the trainer's state is valid."""


def mismatch_values(trainer_M: Tensor, engine_M: Tensor) -> dict[str, Tensor]:
    """The per-token values whose means `mismatch_metrics` takes, each [M].

    They are |log-ratio|, Schulman's k3 estimate of KL(engine || trainer) from the engine's samples,
    and the importance weight with its square.
    """
    logs_M = (trainer_M - engine_M).detach()
    weights_M = logs_M.clamp(max=LARGEST_LOG).exp()
    return {
        "mismatch_mean": logs_M.abs(),
        "mismatch_kl": logs_M.clamp(max=LARGEST_LOG).expm1() - logs_M,
        "mismatch_weight": weights_M,
        "mismatch_weight_square": weights_M.square(),
    }


def mismatch_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """The means, with the two moments of the weights replaced by `mismatch_ess`.

    That is the effective share of tokens, (mean of w)^2 / mean of w^2 (Kong 1992): 1 if engine and
    trainer agree.
    """
    metrics = dict(means)
    if "mismatch_weight" in metrics:
        mean, square = metrics.pop("mismatch_weight"), metrics.pop("mismatch_weight_square")
        metrics["mismatch_ess"] = mean * mean / square if square else 0.0
    return metrics


def importance_weights(
    log_ratios_T: Sequence[float], *, level: str, cap: float, low: float, high: float
) -> list[float]:
    """The importance weight of each token, from its log pi_trainer - log pi_engine.

    w = exp(log-ratio) for each token, or with `level` "sequence" exp(sum of the log-ratios) for all
    tokens of the sample; the exponent is at most `LARGEST_LOG` (verl's bound, too). Weights below
    `low` or above `high` (0: no bound) are rejected, which sets them to 0. The others are truncated
    at `cap` (0: no truncation). Truncated importance sampling: Ionides 2008, and Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"; rejection: "masked
    importance sampling" in the same line of work.
    """
    logs_T = [sum(log_ratios_T)] * len(log_ratios_T) if level == "sequence" else list(log_ratios_T)
    weights_T = [math.exp(min(log, LARGEST_LOG)) for log in logs_T]
    return [0.0 if w < low or (high and w > high) else min(w, cap) if cap else w for w in weights_T]
