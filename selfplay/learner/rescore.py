"""Computations over a rollout before any weight changes: per-token values, such as the trainer's
own log-probs, and the mismatch of engine and trainer.

The engine samples from its own probabilities. Other kernels, another precision or stale weights
make them differ from the trainer's, which importance weights correct. Shapes: M trained tokens of a
micro-batch. Log-probs in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from selfplay.advantages.sample import Sample
from selfplay.config import OptimConfig
from selfplay.errors import EngineDisagrees
from selfplay.learner.batch import MicroBatch, micro_batches
from selfplay.learner.learner import Learner
from selfplay.learner.loss import MAX_LOG_RATIO

MISMATCH_METRICS = ("mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_ess")


def token_values(
    learner: Learner,
    samples: Sequence[Sample],
    function: Callable[[MicroBatch], Tensor],
    *,
    optim: OptimConfig,
) -> list[list[float]]:
    """The values of `function`, [M] for a micro-batch, as one float per token of each sample.

    Untrained tokens have 0. Computes no gradients. Every rank must call; `function` is called
    equally often on each rank.
    """
    values: list[list[float]] = [[] for _ in samples]
    for indices, batch in micro_batches(
        samples,
        learner.world,
        budget=optim.tokens_per_microbatch,
        share_prefixes=optim.share_prefixes,
    ):
        with torch.no_grad():
            values_M = iter(function(batch).tolist())
        for i in indices:
            values[i] = at_trained_tokens(values_M, samples[i])
    return values


def at_trained_tokens(values: Iterable[float], sample: Sample) -> list[float]:
    """The next values at the sample's trained tokens, 0 at the others."""
    left = iter(values)
    return [next(left) if m else 0.0 for m in sample.mask]


class Watched:
    """Records the update's first look at the samples of these names: `seen` has, by name, each
    trained token's advantage and, if no weight has changed yet, the trainer's log-prob of it.
    `advantages` has the mean advantage of every sample that this rank trains, by name.

    It copies a loss's tensors to the host, so it should watch few samples, as of logged games.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Every rank passes the same names; it only sees the samples that it trains."""
        self._names, self.changed, self.advantages = names, False, dict[str, float]()
        self.seen: dict[str, tuple[list[float], list[float]]] = {}

    def see(self, logprobs_M: Tensor, batch: MicroBatch) -> None:
        """Read the loss's log-probs of a micro-batch."""
        for number, name in enumerate(batch.names):
            if name in self._names and name not in self.seen:
                own_M = batch.sample_M == number
                trainer = [] if self.changed else logprobs_M.detach()[own_M].tolist()
                self.seen[name] = batch.advantages_M[own_M].tolist(), trainer


# --- the mismatch of engine and trainer -----------------------------------------------------------


def mismatch_values(trainer_M: Tensor, engine_M: Tensor) -> dict[str, Tensor]:
    """The per-token values, each [M], whose means (and maximum) `with_ess` takes.

    They are |log-ratio|, Schulman's k3 estimate of KL(engine || trainer) from the engine's samples,
    and the importance weight with its square.
    """
    logs_M = (trainer_M - engine_M).detach()
    weights_M = logs_M.clamp(max=MAX_LOG_RATIO).exp()
    return {
        "mismatch_mean": logs_M.abs(),
        "mismatch_max": logs_M.abs(),
        "mismatch_kl": logs_M.clamp(max=MAX_LOG_RATIO).expm1() - logs_M,
        "mismatch_weight": weights_M,
        "mismatch_weight_square": weights_M.square(),
    }


def with_ess(means: Mapping[str, float]) -> dict[str, float]:
    """The means, with the two moments of the weights replaced by `mismatch_ess`.

    This is the effective share of tokens, (mean of w)^2 / mean of w^2 (Kong 1992): 1 if engine and
    trainer agree.
    """
    metrics = dict(means)
    if "mismatch_weight" in metrics:
        mean, square = metrics.pop("mismatch_weight"), metrics.pop("mismatch_weight_square")
        metrics["mismatch_ess"] = mean * mean / square if square else 0.0
    return metrics


def check_mismatch(metrics: Mapping[str, float], bound: float) -> None:
    """Check the mean log-prob mismatch of a rollout's samples (`update_policy` says which) before
    any weight changes.

    Raises EngineDisagrees if it is above `bound` (`SyncCheck.bound`), in nats per token. The
    standard deviation of a token's difference is near 0.05 in bf16, so the standard error over
    10,000 tokens is 0.0005: a healthy mean of 0.02 is 60 standard errors below a bound of 0.05. A
    model with more noise raises the bound, in the first step by the noise that the start check
    measures, later by the noise of its turns.
    """
    mismatch = metrics.get("mismatch_mean", 0.0)
    if not mismatch <= bound:  # also true for NaN
        if bound == 0.0:
            raise EngineDisagrees(
                "engine.exact: log-probs of engine and trainer differ in this step's games, by up "
                f"to {metrics['mismatch_max']:.2g} nats; engine.exact=false continues the run"
            )
        raise EngineDisagrees(
            f"the mean log-prob mismatch of this step's games is {mismatch:.4f} nats per token, "
            f"above {bound:.4g}, the larger of engine.max_mismatch and the bound from measured "
            "noise: the engine's weights are not the trainer's"
        )
