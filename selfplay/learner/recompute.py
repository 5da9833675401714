"""What the trainer's own forward passes say about a rollout before its first update.

Every pass gives one float for each trained token, written back on the samples, so that whatever
is learnt from them afterwards (ratios, divergences, advantages) works on floats. Shapes: M trained
tokens of a micro-batch. Knows no games and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfplay.credit.sample import Sample
from selfplay.distributed import World, all_reduce_sum
from selfplay.learner.batch import MicroBatch, pack, split_by_tokens
from selfplay.learner.learner import (
    Learner,
    UpdateSettings,
    batch_logprobs,
    even_out,
    is_filler,
    reference_logprobs,
)
from selfplay.learner.loss import kl_estimate
from selfplay.learner.mismatch import (
    EngineDisagrees,
    importance_weights,
    mismatch_metrics,
    mismatch_values,
)
from selfplay.learner.token_means import TokenMeans


def recompute_logprobs(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with all that this step's methods want to know before weights move, and metrics.

    By default nothing. With recomputed old log-probs the trainer's replace the engine's, tokens get
    their importance, and the metrics say how far the engine's were off. With the divergence in the
    reward every trained token is charged with its own. Every rank must call.
    """
    algorithm = settings.algorithm
    scored, found = list(samples), dict[str, float]()
    if algorithm.old_logprobs == "recomputed":
        scored, found = _recomputed(learner, scored, settings=settings)
        check_mismatch(found, settings.max_mismatch)
    if learner.reference is not None and algorithm.kl_in == "reward":
        scored, seen = _kl_penalized(learner, scored, settings=settings)
        found |= seen
    return scored, found


def _recomputed(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    algorithm, tally = settings.algorithm, TokenMeans(learner.world)

    def policy(batch: MicroBatch) -> Tensor:
        logprobs_M, _ = batch_logprobs(
            learner, learner.model, batch, temperature=settings.temperature
        )
        seen = mismatch_values(logprobs_M, batch.old_logprobs_M)
        tally.add(seen, batch)
        tally.largest("mismatch_max", seen["mismatch_mean"], batch)
        return logprobs_M

    olds = token_values(learner, samples, policy, settings=settings)
    scored = []
    for sample, old in zip(samples, olds, strict=True):
        importance: list[float] = []
        if algorithm.importance != "none":
            log_ratios_T = [
                mine - theirs
                for mine, theirs, m in zip(old, sample.old_logprobs, sample.mask, strict=True)
                if m
            ]
            left = iter(
                importance_weights(
                    log_ratios_T,
                    level=algorithm.importance,
                    cap=algorithm.importance_cap,
                    low=algorithm.importance_low,
                    high=algorithm.importance_high,
                )
            )
            importance = [next(left) if m else 0.0 for m in sample.mask]
        scored.append(replace(sample, old_logprobs=old, importance=importance))
    found = mismatch_metrics(tally.means())
    return scored, found | _importance_metrics(scored, learner.world)


def _importance_metrics(samples: Sequence[Sample], world: World) -> dict[str, float]:
    """Mean importance and the rejected share of all ranks' trained tokens; {} without either."""
    weights = [w for s in samples for w, m in zip(s.importance, s.mask, strict=False) if m]
    rejected = float(sum(w == 0.0 for w in weights))
    total, rejected, num = all_reduce_sum([sum(weights), rejected, float(len(weights))], world)
    return {"importance_mean": total / num, "rejected_share": rejected / num} if num else {}


def _kl_penalized(
    learner: Learner, samples: Sequence[Sample], *, settings: UpdateSettings
) -> tuple[list[Sample], dict[str, float]]:
    """Minus the weighed k1 of every trained token on its reward. Its sum over a sequence is the
    log-ratio of the whole, so the return's gradient is that of the divergence. Samples whose
    advantages were given have no rewards to charge."""
    tally = TokenMeans(learner.world)

    def k1(batch: MicroBatch) -> Tensor:
        reference_M = reference_logprobs(learner, batch, temperature=settings.temperature)
        shown_M = kl_estimate(batch.old_logprobs_M, reference_M, estimator="k3")
        tally.add({"kl_reference": shown_M}, batch)
        return kl_estimate(batch.old_logprobs_M, reference_M, estimator="k1")

    scores = token_values(learner, samples, k1, settings=settings)
    charged = [
        replace(s, rewards=[r - learner.kl * kl for r, kl in zip(s.rewards, kls, strict=True)])
        if s.rewards
        else s
        for s, kls in zip(samples, scores, strict=True)
    ]
    return charged, tally.means()


def token_values(
    learner: Learner,
    samples: Sequence[Sample],
    scorer: Callable[[MicroBatch], Tensor],
    *,
    settings: UpdateSettings,
) -> list[list[float]]:
    """What `scorer` says, [M] a micro-batch, as one float a token of each sample; 0 where it is
    not trained. Runs without gradients; every rank must call, and meets the same number of
    micro-batches."""
    world = learner.world
    budget = settings.optim.tokens_per_microbatch
    plan = split_by_tokens([len(s.ids) for s in samples], budget=budget)
    packed = [pack([samples[i] for i in places], device=world.device) for places in plan]
    scores: list[list[float]] = [[] for _ in samples]
    for number, batch in enumerate(even_out(packed, world)):
        with torch.no_grad():
            left = iter(scorer(batch).tolist())
        for i in () if is_filler(batch) else plan[number]:
            scores[i] = [next(left) if m else 0.0 for m in samples[i].mask]
    return scores


def check_mismatch(metrics: Mapping[str, float], bound: float) -> None:
    """Compare engine and trainer over the full rollout, before any weight moves.

    Raises EngineDisagrees when the mean gap is above `engine.max_mismatch`. A token's difference has a
    standard deviation near 0.05 in bf16, so the mean of 10,000 tokens is known to 0.0005, and a
    healthy mean of 0.02 would have to be 60 of those off. Only a model whose own noise is as large
    as the bound ends wrongly; the first step shows it.
    """
    gap = metrics.get("mismatch_mean", 0.0)
    if not gap <= bound:  # NaN is no agreement either
        raise EngineDisagrees(
            f"engine and trainer log-probs differ by {gap:.4f} nats a token on average over this "
            f"step's games, engine.max_mismatch is {bound:g}: the engine does not speak "
            "with the trainer's weights"
        )
