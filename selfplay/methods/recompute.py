"""The trainer's log-probs instead of the engine's, and importance weights for their mismatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from torch import Tensor

from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.distributed import World, all_reduce_sum
from selfplay.learner.batch import MicroBatch
from selfplay.learner.learner import TokenMeans, batch_logprobs
from selfplay.learner.loss import MAX_LOG_RATIO
from selfplay.learner.method import Method
from selfplay.learner.rescore import at_trained_tokens, mismatch_values, token_values, with_ess
from selfplay.methods.options import RecomputeOptions


class Recompute(Method):
    """Replaces the old log-probs of every rank's samples with the trainer's, before the update."""

    Options = RecomputeOptions

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with the trainer's log-probs and, if set, a column `importance`; metrics of
        the mismatch."""
        learner = self.parts.learner
        token_means = TokenMeans(learner.world)

        def policy_logprobs(batch: MicroBatch) -> Tensor:
            logprobs_M, _ = batch_logprobs(
                learner, learner.model, batch, temperature=config.rollout.temperature
            )
            token_means.add(mismatch_values(logprobs_M, batch.old_logprobs_M), batch)
            return logprobs_M

        recomputed = []
        logprobs = token_values(learner, samples, policy_logprobs, optim=config.optim)
        for sample, by_trainer in zip(samples, logprobs, strict=True):
            columns = sample.columns | _importance(sample, by_trainer, self.options)
            recomputed.append(replace(sample, old_logprobs=by_trainer, columns=columns))
        metrics = with_ess(token_means.means())
        return recomputed, metrics | _importance_metrics(recomputed, learner.world)


def importance_weights(log_ratios_K: Sequence[float], *, level: str, cap: float) -> list[float]:
    """The importance weight of each token, from its log pi_trainer - log pi_engine.

    w = exp(log-ratio) for each token, or with `level` "sequence" exp(sum of the log-ratios) for all
    tokens of the sample, truncated at `cap`; the exponent is at most `MAX_LOG_RATIO` (also verl's
    bound). Truncated importance sampling: Ionides 2008, and Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training".
    """
    logs_K = [sum(log_ratios_K)] * len(log_ratios_K) if level == "sequence" else log_ratios_K
    return [min(math.exp(min(log, MAX_LOG_RATIO)), cap) for log in logs_K]


def _importance(
    sample: Sample, by_trainer: Sequence[float], options: RecomputeOptions
) -> dict[str, list[float]]:
    """A column with each token's importance weight, 0 if it is not trained; {} if off."""
    if options.importance == "none":
        return {}
    pairs = zip(by_trainer, sample.old_logprobs, strict=True)
    log_ratios_K = [new - old for new, old in compress(pairs, sample.mask)]
    weights_K = importance_weights(log_ratios_K, level=options.importance, cap=options.cap)
    return {"importance": at_trained_tokens(weights_K, sample)}


def _importance_metrics(samples: Sequence[Sample], world: World) -> dict[str, float]:
    """The mean importance weight of all ranks' trained tokens; {} if off."""
    weights = [
        weight for s in samples for weight in compress(s.columns.get("importance", ()), s.mask)
    ]
    total, num = all_reduce_sum([sum(weights), float(len(weights))], world)
    return {"importance_mean": total / num} if num else {}
