"""What the trainer's own forward passes say about a rollout before its first update.

Every pass gives one float for each trained token, written back on the samples, so that whatever
is learnt from them afterwards (ratios, divergences, advantages) works on floats. Shapes: M trained
tokens of a micro-batch. Knows no losses, no games and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfplay.batch import MicroBatch, pack, split_by_tokens
from selfplay.config import Config
from selfplay.learner import Learner, batch_logprobs, even_out, is_filler
from selfplay.samples import Sample
from selfplay.token_means import TokenMeans


def score(
    learner: Learner, samples: Sequence[Sample], *, config: Config
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with all that this step's methods want to know before weights move, and metrics.

    With recomputed old log-probs the trainer's replace the engine's, and the metrics say how far
    the engine's were off. Every rank must call.
    """
    scored, found = list(samples), dict[str, float]()
    if config.algorithm.old_logprobs == "recomputed":
        tally = TokenMeans(learner.world)

        def policy(batch: MicroBatch) -> Tensor:
            logprobs_M, _ = batch_logprobs(
                learner, learner.model, batch, temperature=config.rollout.temperature
            )
            gaps_M = (logprobs_M - batch.old_logprobs_M).abs()
            tally.add({"gap_mean": gaps_M}, batch)
            tally.largest("gap_max", gaps_M, batch)
            return logprobs_M

        olds = token_scores(learner, scored, policy, config=config)
        scored = [replace(s, old_logprobs=old) for s, old in zip(scored, olds, strict=True)]
        found |= tally.means()
        check_gap(found, config)
    return scored, found


def token_scores(
    learner: Learner,
    samples: Sequence[Sample],
    scorer: Callable[[MicroBatch], Tensor],
    *,
    config: Config,
) -> list[list[float]]:
    """What `scorer` says, [M] a micro-batch, as one float a token of each sample; 0 where it is
    not trained. Runs without gradients; every rank must call, and meets the same number of
    micro-batches."""
    world = learner.world
    budget = config.optim.tokens_per_microbatch
    plan = split_by_tokens([len(s.ids) for s in samples], budget=budget)
    packed = [pack([samples[i] for i in places], device=world.device) for places in plan]
    scores: list[list[float]] = [[] for _ in samples]
    for number, batch in enumerate(even_out(packed, world)):
        with torch.no_grad():
            left = iter(scorer(batch).tolist())
        for i in () if is_filler(batch) else plan[number]:
            scores[i] = [next(left) if m else 0.0 for m in samples[i].mask]
    return scores


def check_gap(metrics: dict[str, float], config: Config) -> None:
    """The whole rollout is the strictest comparison of engine and trainer, and it costs nothing.

    Raises RuntimeError when the mean gap is above `engine.max_gap`.
    """
    gap = metrics.get("gap_mean", 0.0)
    if not gap <= config.engine.max_gap:  # NaN is no agreement either
        raise RuntimeError(
            f"engine and trainer log-probs differ by {gap:.4f} nats a token on average over this "
            f"step's games, engine.max_gap is {config.engine.max_gap:g}: the engine does not speak "
            "with the trainer's weights"
        )
