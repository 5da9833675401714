"""A micro-batch's loss under its part's objective, with the metrics it shows on the way.

Shapes: M trained tokens of a micro-batch. Knows no optimizer, no games and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.batch import MicroBatch
from selfplay.config import Config
from selfplay.critic import clipped_value_loss
from selfplay.learner import Learner, batch_logprobs, batch_values, is_filler
from selfplay.loss import clipped_surrogate, imitation, kl_k3
from selfplay.samples import Sample
from selfplay.token_means import TokenMeans


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a step's loss: these samples under one objective, times a weight."""

    samples: Sequence[Sample]
    objective: str  # "surrogate" | "imitation" | "value"
    weight: float = 1.0


def part_loss(
    learner: Learner, part: Part, batch: MicroBatch, *, config: Config, tally: TokenMeans
) -> Tensor:
    """The sum of a micro-batch's token losses; counts its metrics."""
    if part.objective == "value":
        return _value_loss(learner, batch, config=config, tally=tally)
    algorithm = config.algorithm
    # A teacher's words were never sampled, so imitation learns the plain softmax whatever the
    # temperature of play is.
    at = config.rollout.temperature if part.objective == "surrogate" else 1.0
    logprobs_M, entropies_M = batch_logprobs(learner, learner.model, batch, temperature=at)
    if part.objective == "imitation":
        losses_M = imitation(logprobs_M, batch.advantages_M)
        seen = {"imitation_loss": losses_M}
    else:
        losses_M, ratios_M, cut_M = clipped_surrogate(
            logprobs_M,
            batch.old_logprobs_M,
            batch.advantages_M,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        seen = {"policy_loss": losses_M, "ratio_mean": ratios_M, "clip_share": cut_M}
        seen["entropy"] = entropies_M
        if algorithm.old_logprobs == "engine":
            gaps_M = (logprobs_M - batch.old_logprobs_M).detach().abs()
            seen["gap_mean"] = gaps_M
            tally.largest("gap_max", gaps_M, batch)
        if learner.reference is not None:
            with torch.no_grad():
                reference_M, _ = batch_logprobs(learner, learner.reference, batch, temperature=at)
            kl_M = kl_k3(logprobs_M, reference_M)
            losses_M = losses_M + algorithm.kl * kl_M
            seen["kl_reference"] = kl_M
    _check_finite(losses_M, batch, kind=part.objective)
    tally.add(seen, batch)
    # A filler's advantage is 0, but its KL term is not.
    return losses_M.sum() * (0.0 if is_filler(batch) else 1.0)


def _value_loss(
    learner: Learner, batch: MicroBatch, *, config: Config, tally: TokenMeans
) -> Tensor:
    values_M = batch_values(learner, batch)
    losses_M, cut_M = clipped_value_loss(
        values_M, batch.values_M, batch.returns_M, clip=config.critic.clip
    )
    _check_finite(losses_M, batch, kind="value")
    tally.add({"value_loss": losses_M, "value_clip_share": cut_M}, batch)
    return losses_M.sum() * (0.0 if is_filler(batch) else 1.0)


def _check_finite(losses_M: Tensor, batch: MicroBatch, *, kind: str) -> None:
    if not bool(torch.isfinite(losses_M).all()):
        bad = int((~torch.isfinite(losses_M)).nonzero()[0, 0])
        name = batch.names[int(batch.sample_M[bad])]
        raise FloatingPointError(
            f"the {kind} loss of {name} is {losses_M[bad].item()}; no step was taken"
        )
