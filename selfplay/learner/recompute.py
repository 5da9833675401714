"""The trainer's forward passes over a rollout before its first update.

Each pass gives one float for each trained token, which new samples carry: recomputed log-probs,
importance weights, KL penalties, values. Shapes: M trained tokens of a micro-batch, T trained
tokens of one sample. Log-probs in nats. Knows no games and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfplay.config import AlgorithmConfig
from selfplay.credit.sample import Sample
from selfplay.distributed import World, all_reduce_sum
from selfplay.learner.batch import MicroBatch, micro_batches, split
from selfplay.learner.learner import (
    Learner,
    TokenMeans,
    UpdateSettings,
    batch_logprobs,
    even_out,
    reference_logprobs,
)
from selfplay.learner.loss import kl_estimate
from selfplay.learner.mismatch import (
    EngineDisagrees,
    importance_weights,
    mismatch_metrics,
    mismatch_values,
)


def recompute_logprobs(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with the trainer's log-probs and KL penalties, as the settings ask, and metrics.

    By default samples stay as they are. With `old_logprobs: recomputed` the trainer's log-probs
    replace the engine's, tokens get importance weights, and the metrics contain the mismatch, which
    raises EngineDisagrees above `settings.max_mismatch`. With `kl_in: reward` each trained token's
    reward is reduced by its KL penalty. Every rank must call.
    """
    algorithm = settings.algorithm
    recomputed, metrics = list(samples), dict[str, float]()
    if algorithm.old_logprobs == "recomputed":
        recomputed, metrics = _recomputed(learner, recomputed, settings=settings)
        check_mismatch(metrics, settings.max_mismatch)
    if learner.reference is not None and algorithm.kl_in == "reward":
        recomputed, kl_metrics = _kl_penalized(learner, recomputed, settings=settings)
        metrics |= kl_metrics
    return recomputed, metrics


def _recomputed(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with the trainer's log-probs and, if set, importance; mismatch metrics."""
    algorithm, tally = settings.algorithm, TokenMeans(learner.world)

    def policy_logprobs(batch: MicroBatch) -> Tensor:
        logprobs_M, _ = batch_logprobs(
            learner, learner.model, batch, temperature=settings.temperature
        )
        values = mismatch_values(logprobs_M, batch.old_logprobs_M)
        tally.add(values, batch)
        tally.largest("mismatch_max", values["mismatch_mean"], batch)
        return logprobs_M

    recomputed = []
    logprobs = token_values(learner, samples, policy_logprobs, settings=settings)
    for sample, by_trainer in zip(samples, logprobs, strict=True):
        importance = _importance(sample, by_trainer, algorithm)
        recomputed.append(replace(sample, old_logprobs=by_trainer, importance=importance))
    metrics = mismatch_metrics(tally.means())
    return recomputed, metrics | _importance_metrics(recomputed, learner.world)


def _importance(
    sample: Sample, by_trainer: Sequence[float], algorithm: AlgorithmConfig
) -> list[float]:
    """An importance weight for each token, 0 where it is not trained; [] without importance."""
    if algorithm.importance == "none":
        return []
    log_ratios_T = [
        new - old
        for new, old, m in zip(by_trainer, sample.old_logprobs, sample.mask, strict=True)
        if m
    ]
    weights_T = importance_weights(
        log_ratios_T,
        level=algorithm.importance,
        cap=algorithm.importance_cap,
        low=algorithm.importance_low,
        high=algorithm.importance_high,
    )
    return _at_trained_tokens(weights_T, sample)


def _importance_metrics(samples: Sequence[Sample], world: World) -> dict[str, float]:
    """Mean importance and rejected share of all ranks' trained tokens; {} without importance."""
    weights = [w for s in samples for w, m in zip(s.importance, s.mask, strict=False) if m]
    rejected = float(sum(w == 0.0 for w in weights))
    total, rejected, num = all_reduce_sum([sum(weights), rejected, float(len(weights))], world)
    return {"importance_mean": total / num, "rejected_share": rejected / num} if num else {}


def _kl_penalized(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with each trained token's weighted k1 subtracted from its reward.

    The k1 terms of a sequence sum to its log-ratio, so the policy gradient of the return includes
    the gradient of the KL. Samples with given advantages have no rewards and stay as they are.
    """
    tally = TokenMeans(learner.world)

    def k1(batch: MicroBatch) -> Tensor:
        reference_M = reference_logprobs(learner, batch, temperature=settings.temperature)
        k3_M = kl_estimate(batch.old_logprobs_M, reference_M, estimator="k3")
        tally.add({"kl_reference": k3_M}, batch)
        return kl_estimate(batch.old_logprobs_M, reference_M, estimator="k1")

    estimates = token_values(learner, samples, k1, settings=settings)
    penalized = [
        replace(s, rewards=[r - learner.kl * kl for r, kl in zip(s.rewards, kls, strict=True)])
        if s.rewards
        else s
        for s, kls in zip(samples, estimates, strict=True)
    ]
    return penalized, tally.means()


def token_values(
    learner: Learner,
    samples: Sequence[Sample],
    function: Callable[[MicroBatch], Tensor],
    *,
    settings: UpdateSettings,
) -> list[list[float]]:
    """The values of `function`, [M] for a micro-batch, as one float for each token of each sample.

    Untrained tokens have 0. Computes no gradients. Every rank must call; `function` is called
    equally often on each.
    """
    world = learner.world
    budget, share = settings.optim.tokens_per_microbatch, settings.optim.share_prefixes
    plan = even_out(split(samples, budget=budget, share=share), world)
    batches = micro_batches(samples, plan, device=world.device, share=share)
    values: list[list[float]] = [[] for _ in samples]
    for indices, batch in zip(plan, batches, strict=True):
        with torch.no_grad():
            values_M = iter(function(batch).tolist())
        for i in indices:
            values[i] = _at_trained_tokens(values_M, samples[i])
    return values


def _at_trained_tokens(values: Iterable[float], sample: Sample) -> list[float]:
    """The next values at the sample's trained tokens, 0 at the others."""
    left = iter(values)
    return [next(left) if m else 0.0 for m in sample.mask]


def check_mismatch(metrics: Mapping[str, float], bound: float) -> None:
    """Check the mean log-prob mismatch over the full rollout, before any weight moves.

    Raises EngineDisagrees if it is above `bound` (`SyncCheck.bound`), in nats a token. The
    standard deviation of a token's difference is near 0.05 in bf16, so the standard error over
    10,000 tokens is 0.0005: a healthy mean of 0.02 is 60 standard errors below a bound of 0.05. A
    false alarm needs a model whose noise reaches `engine.max_mismatch`, and happens in the first
    step; noise that grows later raises the bound.
    """
    mismatch = metrics.get("mismatch_mean", 0.0)
    if not mismatch <= bound:  # also true for NaN
        raise EngineDisagrees(
            f"the mean log-prob mismatch of this step's games is {mismatch:.4f} nats a token, "
            f"above {bound:.4g}, the larger of engine.max_mismatch and what the noise floor "
            "allows: the engine's weights are not the trainer's"
        )
