"""What the trainer computes over a rollout before any weight changes: its own log-probs, the
critic's values, and the mismatch of engine and trainer.

The engine samples from its own probabilities. With other kernels, another precision or stale
weights they differ from the trainer's, and importance weights correct for it. Shapes: M trained
tokens of a micro-batch, K trained tokens of one sample or of this rank. Log-probs in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from selfplay.advantages.advantages import with_gae
from selfplay.advantages.sample import Sample
from selfplay.config import AlgorithmConfig, Config, OptimConfig
from selfplay.distributed import World, all_reduce_sum
from selfplay.errors import EngineDisagrees
from selfplay.learner.batch import MicroBatch, micro_batches
from selfplay.learner.learner import Learner, TokenMeans, batch_logprobs, batch_values
from selfplay.learner.loss import LARGEST_LOG

MISMATCH_METRICS = ("mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_ess")
WHITE_EPS = 1e-8  # added to the variance, so that equal advantages become 0


def recompute_logprobs(
    learner: Learner, samples: Sequence[Sample], *, config: Config
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with the trainer's log-probs in place of the engine's and, if set, importance
    weights; metrics of the mismatch. Every rank must call, before any weight changes."""
    algorithm, token_means = config.algorithm, TokenMeans(learner.world)

    def policy_logprobs(batch: MicroBatch) -> Tensor:
        logprobs_M, _ = batch_logprobs(
            learner, learner.model, batch, temperature=config.rollout.temperature
        )
        add_mismatch(token_means, logprobs_M, batch)
        return logprobs_M

    recomputed = []
    logprobs = token_values(learner, samples, policy_logprobs, optim=config.optim)
    for sample, by_trainer in zip(samples, logprobs, strict=True):
        importance = _importance(sample, by_trainer, algorithm)
        recomputed.append(replace(sample, old_logprobs=by_trainer, importance=importance))
    metrics = with_ess(token_means.means())
    return recomputed, metrics | _importance_metrics(recomputed, learner.world)


def token_values(
    learner: Learner,
    samples: Sequence[Sample],
    function: Callable[[MicroBatch], Tensor],
    *,
    optim: OptimConfig,
) -> list[list[float]]:
    """The values of `function`, [M] for a micro-batch, as one float for each token of each sample.

    Untrained tokens have 0. Computes no gradients. Every rank must call; `function` is called
    equally often on each.
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
            values[i] = _at_trained_tokens(values_M, samples[i])
    return values


def importance_weights(log_ratios_K: Sequence[float], *, level: str, cap: float) -> list[float]:
    """The importance weight of each token, from its log pi_trainer - log pi_engine.

    w = exp(log-ratio) for each token, or with `level` "sequence" exp(sum of the log-ratios) for all
    tokens of the sample, truncated at `cap`; the exponent is at most `LARGEST_LOG` (verl's bound,
    too). Truncated importance sampling: Ionides 2008, and Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training".
    """
    logs_K = [sum(log_ratios_K)] * len(log_ratios_K) if level == "sequence" else log_ratios_K
    return [min(math.exp(min(log, LARGEST_LOG)), cap) for log in logs_K]


def _importance(
    sample: Sample, by_trainer: Sequence[float], algorithm: AlgorithmConfig
) -> list[float]:
    """An importance weight for each token, 0 where it is not trained; [] without importance."""
    if algorithm.importance == "none":
        return []
    pairs = zip(by_trainer, sample.old_logprobs, strict=True)
    log_ratios_K = [new - old for new, old in compress(pairs, sample.mask)]
    weights_K = importance_weights(
        log_ratios_K, level=algorithm.importance, cap=algorithm.importance_cap
    )
    return _at_trained_tokens(weights_K, sample)


def _importance_metrics(samples: Sequence[Sample], world: World) -> dict[str, float]:
    """The mean importance of all ranks' trained tokens; {} without importance."""
    weights = [weight for s in samples for weight in compress(s.importance, s.mask)]
    total, num = all_reduce_sum([sum(weights), float(len(weights))], world)
    return {"importance_mean": total / num} if num else {}


def _at_trained_tokens(values: Iterable[float], sample: Sample) -> list[float]:
    """The next values at the sample's trained tokens, 0 at the others."""
    left = iter(values)
    return [next(left) if m else 0.0 for m in sample.mask]


# --- the critic's values, for PPO -----------------------------------------------------------------


def estimate_values(
    learner: Learner, samples: Sequence[Sample], *, config: Config
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with values, returns and advantages (GAE), and metrics of the values.

    Every rank must call it once per rollout, before any weight changes. `explained_variance` is
    1 - Var(return - value) / Var(return); it is missing if all returns are equal.
    """
    world = learner.world
    values = token_values(learner, samples, partial(batch_values, learner), optim=config.optim)
    valued = [
        with_gae(sample, of_sample, lam=config.critic.lam)
        for sample, of_sample in zip(samples, values, strict=True)
    ]
    returns_K = [g for s in valued for g in compress(s.returns, s.mask)]
    values_K = [v for s in valued for v in compress(s.values, s.mask)]
    return_mean, return_variance = moments(returns_K, world)
    metrics = {"return_mean": return_mean}
    if return_variance > 0.0:
        errors_K = [g - v for g, v in zip(returns_K, values_K, strict=True)]
        metrics["explained_variance"] = 1.0 - moments(errors_K, world)[1] / return_variance
    return whitened(valued, world), metrics


def whitened(samples: Sequence[Sample], world: World) -> list[Sample]:
    """The samples with advantages of mean 0 and variance 1 over the trained tokens of all ranks."""
    mean, variance = moments([a for s in samples for a in compress(s.advantages, s.mask)], world)
    scale = 1.0 / math.sqrt(variance + WHITE_EPS)

    def white(sample: Sample) -> list[float]:
        whitened_K = ((a - mean) * scale for a in compress(sample.advantages, sample.mask))
        return _at_trained_tokens(whitened_K, sample)

    return [replace(sample, advantages=white(sample)) for sample in samples]


def moments(values_K: Sequence[float], world: World) -> tuple[float, float]:
    """Mean and variance over all ranks; 0 and 0 without any value."""
    total, count = all_reduce_sum([sum(values_K), float(len(values_K))], world)
    mean = total / max(1.0, count)
    squares = all_reduce_sum([sum((value - mean) ** 2 for value in values_K)], world)[0]
    return mean, squares / max(1.0, count)


# --- the mismatch of engine and trainer -----------------------------------------------------------


def add_mismatch(token_means: TokenMeans, trainer_M: Tensor, batch: MicroBatch) -> None:
    """Add the mismatch of the trainer's log-probs [M] and those that the batch has to the means."""
    values = mismatch_values(trainer_M, batch.old_logprobs_M)
    token_means.add(values, batch)
    token_means.add_largest("mismatch_max", values["mismatch_mean"], batch)


def mismatch_values(trainer_M: Tensor, engine_M: Tensor) -> dict[str, Tensor]:
    """The per-token values whose means `with_ess` takes, each [M].

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


def with_ess(means: Mapping[str, float]) -> dict[str, float]:
    """The means, with the two moments of the weights replaced by `mismatch_ess`.

    That is the effective share of tokens, (mean of w)^2 / mean of w^2 (Kong 1992): 1 if engine and
    trainer agree.
    """
    metrics = dict(means)
    if "mismatch_weight" in metrics:
        mean, square = metrics.pop("mismatch_weight"), metrics.pop("mismatch_weight_square")
        metrics["mismatch_ess"] = mean * mean / square if square else 0.0
    return metrics


def check_mismatch(metrics: Mapping[str, float], bound: float) -> None:
    """Check the mean log-prob mismatch of a rollout's samples (`update_policy` says which), before
    any weight moves.

    Raises EngineDisagrees if it is above `bound` (`SyncCheck.bound`), in nats a token. The
    standard deviation of a token's difference is near 0.05 in bf16, so the standard error over
    10,000 tokens is 0.0005: a healthy mean of 0.02 is 60 standard errors below a bound of 0.05. A
    model with more noise raises the bound, in the first step by the noise that the start check
    measures, later by that of its turns.
    """
    mismatch = metrics.get("mismatch_mean", 0.0)
    if not mismatch <= bound:  # also true for NaN
        if bound == 0.0:
            raise EngineDisagrees(
                f"engine.exact: log-probs of engine and trainer differ in this step's games, by "
                f"{metrics['mismatch_max']:.2g} nats at most; engine.exact=false goes on"
            )
        raise EngineDisagrees(
            f"the mean log-prob mismatch of this step's games is {mismatch:.4f} nats a token, "
            f"above {bound:.4g}, the larger of engine.max_mismatch and what the measured noise "
            "allows: the engine's weights are not the trainer's"
        )
