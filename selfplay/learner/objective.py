"""A micro-batch's loss under its part's objective, with the metrics it shows on the way.

Shapes: M trained tokens of a micro-batch. Knows no optimizer, no games and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.config import AlgorithmConfig
from selfplay.credit.sample import Sample
from selfplay.learner.batch import MicroBatch, num_trained_tokens
from selfplay.learner.critic import clipped_value_loss
from selfplay.learner.learner import (
    Learner,
    UpdateSettings,
    batch_logprobs,
    batch_values,
    is_filler,
    reference_logprobs,
)
from selfplay.learner.loss import (
    aggregation_weights,
    cispo,
    clipped_surrogate,
    gspo,
    imitation,
    kl_estimate,
    ratio,
    reinforce,
    sapo,
    vespo,
)
from selfplay.learner.mismatch import mismatch_values
from selfplay.learner.token_means import TokenMeans


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a step's loss: these samples under one objective, times a weight."""

    samples: Sequence[Sample]
    objective: str  # "surrogate" | "imitation" | "value"
    weight: float = 1.0


def denominator(part: Part, algorithm: AlgorithmConfig) -> float:
    """What this rank adds to the number that the part's summed loss is divided by."""
    if part.objective == "surrogate" and algorithm.aggregation != "token_mean":
        return float(sum(any(sample.mask) for sample in part.samples))
    return float(num_trained_tokens(part.samples))


def part_loss(
    learner: Learner, part: Part, batch: MicroBatch, *, settings: UpdateSettings, tally: TokenMeans
) -> Tensor:
    """The sum of a micro-batch's weighed token losses; counts its metrics."""
    if part.objective == "imitation":
        # A teacher's words were never sampled, so imitation learns the plain softmax whatever the
        # temperature of play is.
        logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
        losses_M = imitation(logprobs_M, batch.advantages_M)
        tally.add({"imitation_loss": losses_M}, batch)
    elif part.objective == "value":
        losses_M = _value_loss(learner, batch, clip=settings.critic.clip, tally=tally)
    else:
        losses_M = _surrogate(learner, batch, settings=settings, tally=tally)
    _check_finite(losses_M, batch, kind=part.objective)
    # A filler's advantage is 0, but its KL term is not.
    return losses_M.sum() * (0.0 if is_filler(batch) else 1.0)


def _surrogate(
    learner: Learner, batch: MicroBatch, *, settings: UpdateSettings, tally: TokenMeans
) -> Tensor:
    """Policy loss, weighed where engine and trainer disagree, with its KL and entropy terms, each
    token's times its weight in the aggregation [M]."""
    algorithm, temperature = settings.algorithm, settings.temperature
    logprobs_M, entropies_M = batch_logprobs(
        learner,
        learner.model,
        batch,
        temperature=temperature,
        entropy_grad=algorithm.entropy > 0,
    )
    losses_M, ratios_M, cut_M = policy_losses(logprobs_M, batch, algorithm)
    losses_M = losses_M * batch.importance_M
    seen = {"policy_loss": losses_M, "ratio_mean": ratios_M, "clip_share": cut_M}
    seen["entropy"] = entropies_M
    if algorithm.old_logprobs == "engine":
        seen |= mismatch_values(logprobs_M, batch.old_logprobs_M)
        tally.largest("mismatch_max", seen["mismatch_mean"], batch)
    if learner.reference is not None and algorithm.kl_in == "loss":
        reference_M = reference_logprobs(learner, batch, temperature=temperature)
        losses_M = losses_M + learner.kl * kl_losses(logprobs_M, reference_M, batch, algorithm)
        seen["kl_reference"] = kl_estimate(logprobs_M, reference_M, estimator="k3")
    if algorithm.entropy:
        losses_M = losses_M - algorithm.entropy * entropies_M
    tally.add(seen, batch)
    return losses_M * aggregation_weights(
        batch.sample_M,
        aggregation=algorithm.aggregation,
        constant_length=algorithm.constant_length,
    )


def policy_losses(
    logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen policy loss of each token, its ratios, and a 0/1 mask of what it cut."""
    old_M, advantages_M = batch.old_logprobs_M, batch.advantages_M
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.loss == "reinforce":
        return reinforce(logprobs_M, old_M, advantages_M)
    if algorithm.loss == "cispo":
        return cispo(logprobs_M, old_M, advantages_M, clip_low=low, clip_high=high)
    if algorithm.loss == "sapo":
        return sapo(logprobs_M, old_M, advantages_M, temperatures=algorithm.sapo_temperatures)
    if algorithm.loss == "vespo":
        return vespo(
            logprobs_M,
            old_M,
            advantages_M,
            batch.sample_M,
            positive=algorithm.vespo_positive,
            negative=algorithm.vespo_negative,
        )
    if algorithm.loss == "gspo":
        return gspo(
            logprobs_M,
            old_M,
            advantages_M,
            batch.sample_M,
            clip_low=low,
            clip_high=high,
            dual_clip=algorithm.dual_clip,
        )
    return clipped_surrogate(
        logprobs_M,
        old_M,
        advantages_M,
        clip_low=low,
        clip_high=high,
        dual_clip=algorithm.dual_clip,
    )


def kl_losses(
    logprobs_M: Tensor, reference_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> Tensor:
    """Each token's divergence from the reference before its weight. Times the ratio its mean under
    the old policy is that under the new one, and the gradient of the mean follows (DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1)."""
    kl_M = kl_estimate(logprobs_M, reference_M, estimator=algorithm.kl_estimator)
    return kl_M * ratio(logprobs_M - batch.old_logprobs_M) if algorithm.kl_ratio else kl_M


def _value_loss(learner: Learner, batch: MicroBatch, *, clip: float, tally: TokenMeans) -> Tensor:
    values_M = batch_values(learner, batch)
    losses_M, cut_M = clipped_value_loss(values_M, batch.values_M, batch.returns_M, clip=clip)
    tally.add({"value_loss": losses_M, "value_clip_share": cut_M}, batch)
    return losses_M


def _check_finite(losses_M: Tensor, batch: MicroBatch, *, kind: str) -> None:
    if not bool(torch.isfinite(losses_M).all()):
        bad = int((~torch.isfinite(losses_M)).nonzero()[0, 0])
        name = batch.names[int(batch.sample_M[bad])]
        raise FloatingPointError(
            f"the {kind} loss of {name} is {losses_M[bad].item()}; no step was taken"
        )
