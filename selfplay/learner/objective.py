"""The loss of a micro-batch under its part's objective, and its metrics.

Shapes: M trained tokens of a micro-batch. Knows no optimizer, no games and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.config import AlgorithmConfig
from selfplay.credit.sample import Sample
from selfplay.learner.batch import MicroBatch, is_filler, num_trained_tokens
from selfplay.learner.critic import clipped_value_loss
from selfplay.learner.learner import (
    Learner,
    TokenMeans,
    UpdateSettings,
    batch_logprobs,
    batch_values,
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


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a step's loss: samples, their objective, and its weight."""

    samples: Sequence[Sample]
    objective: str  # "surrogate" | "imitation" | "value"
    weight: float = 1.0


def denominator(part: Part, algorithm: AlgorithmConfig) -> float:
    """This rank's contribution, in tokens or samples, to the divisor of the part's summed loss."""
    if part.objective == "surrogate" and algorithm.aggregation != "token_mean":
        return float(sum(any(sample.mask) for sample in part.samples))
    return float(num_trained_tokens(part.samples))


def part_loss(
    learner: Learner,
    part: Part,
    batch: MicroBatch,
    *,
    settings: UpdateSettings,
    tally: TokenMeans,
) -> Tensor:
    """A micro-batch's weighted token losses [M]; adds its metrics to `tally`."""
    if part.objective == "imitation":
        # A teacher's tokens were not sampled, so the rollout's temperature does not apply.
        logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
        losses_M = imitation(logprobs_M, batch.advantages_M)
        tally.add({"imitation_loss": losses_M}, batch)
    elif part.objective == "value":
        losses_M = _value_loss(learner, batch, clip=settings.critic.clip, tally=tally)
    else:
        losses_M = _surrogate_loss(learner, batch, settings=settings, tally=tally)
    # A filler's advantage is 0, but its KL term is not.
    return losses_M * (0.0 if is_filler(batch) else 1.0)


def not_finite(losses: Sequence[tuple[str, MicroBatch, Tensor]]) -> list[str]:
    """A sentence with the sample's name for each micro-batch (objective, batch, token losses [M])
    with a loss that is not finite.

    Reading a loss waits for the GPU, so this belongs after the last pass is launched.
    """
    if not losses:
        return []
    sentences = []
    finite = torch.stack([torch.isfinite(losses_M).all() for _, _, losses_M in losses]).tolist()
    for whole, (objective, batch, losses_M) in zip(finite, losses, strict=True):
        if not whole:
            bad = int((~torch.isfinite(losses_M)).nonzero()[0, 0])
            name = batch.names[int(batch.sample_M[bad])]
            sentences.append(f"the {objective} loss of {name} is {losses_M[bad].item()}")
    return sentences


def _surrogate_loss(
    learner: Learner, batch: MicroBatch, *, settings: UpdateSettings, tally: TokenMeans
) -> Tensor:
    """The policy loss times importance weights, plus KL and entropy terms; all of it times the
    aggregation weights [M]."""
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
    values = {"policy_loss": losses_M, "ratio_mean": ratios_M, "clip_share": cut_M}
    values["entropy"] = entropies_M
    if algorithm.old_logprobs == "engine":
        values |= mismatch_values(logprobs_M, batch.old_logprobs_M)
        tally.largest("mismatch_max", values["mismatch_mean"], batch)
    if learner.reference is not None and algorithm.kl_in == "loss":
        reference_M = reference_logprobs(learner, batch, temperature=temperature)
        losses_M = losses_M + learner.kl * kl_losses(logprobs_M, reference_M, batch, algorithm)
        values["kl_reference"] = kl_estimate(logprobs_M, reference_M, estimator="k3")
    if algorithm.entropy:
        losses_M = losses_M - algorithm.entropy * entropies_M
    tally.add(values, batch)
    return losses_M * aggregation_weights(
        batch.sample_M,
        aggregation=algorithm.aggregation,
        constant_length=algorithm.constant_length,
    )


def policy_losses(
    logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, ratios and 0/1 clip mask of `algorithm.loss`, each [M]; see `loss`."""
    old_M, advantages_M = batch.old_logprobs_M, batch.advantages_M
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    if algorithm.loss == "reinforce":
        return reinforce(logprobs_M, old_M, advantages_M)
    if algorithm.loss == "cispo":
        return cispo(logprobs_M, old_M, advantages_M, **clip)
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
    clip["dual_clip"] = algorithm.dual_clip
    if algorithm.loss == "gspo":
        return gspo(logprobs_M, old_M, advantages_M, batch.sample_M, **clip)
    if algorithm.loss == "clip":
        return clipped_surrogate(logprobs_M, old_M, advantages_M, **clip)
    raise ValueError(f"algorithm.loss {algorithm.loss} has no function in learner/objective.py")


def kl_losses(
    logprobs_M: Tensor, reference_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> Tensor:
    """Each token's KL estimate to the reference [M], before its weight.

    With `kl_ratio` it is multiplied by the ratio pi / pi_old, so that its mean over the old
    policy's samples, and the gradient of that mean, are unbiased for the new policy
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    kl_M = kl_estimate(logprobs_M, reference_M, estimator=algorithm.kl_estimator)
    return kl_M * ratio(logprobs_M - batch.old_logprobs_M) if algorithm.kl_ratio else kl_M


def _value_loss(learner: Learner, batch: MicroBatch, *, clip: float, tally: TokenMeans) -> Tensor:
    values_M = batch_values(learner, batch)
    losses_M, cut_M = clipped_value_loss(values_M, batch.values_M, batch.returns_M, clip=clip)
    tally.add({"value_loss": losses_M, "value_clip_share": cut_M}, batch)
    return losses_M
