"""All that is learnt from one rollout: its passes, optimizer steps, and the check of the engine.

Shapes: M trained tokens of a micro-batch. Knows no games and no text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from selfplay.batch import pack, split_by_tokens
from selfplay.config import Config
from selfplay.data import named_seed
from selfplay.learner import Learner, batch_logprobs, even_out
from selfplay.objective import Part
from selfplay.optim import self_play_rate
from selfplay.samples import Sample
from selfplay.token_means import TokenMeans
from selfplay.update import update


def learn(
    learner: Learner,
    samples: Sequence[Sample],
    replay: Sequence[Part],
    *,
    step: int,
    config: Config,
) -> dict[str, float]:
    """All optimizer steps of one rollout: `epochs` passes, each cut into `minibatches` by a named
    shuffle.

    Returns metrics averaged over the optimizer steps; the gap to the engine is that of the first,
    before any weight moved. With recomputed old log-probs the trainer scores the rollout once more
    first.
    """
    algorithm = config.algorithm
    found: dict[str, float] = {}
    if algorithm.old_logprobs == "recomputed":
        samples, found = rescored(learner, samples, config=config)
    seen: list[dict[str, float]] = []
    for epoch in range(algorithm.epochs):
        order = list(range(len(samples)))
        if algorithm.minibatches > 1:
            random.Random(named_seed(config.seed, "minibatches", step, epoch)).shuffle(order)
        for place in range(algorithm.minibatches):
            part = Part([samples[i] for i in order[place :: algorithm.minibatches]], "surrogate")
            seen.append(
                update(learner, [part, *replay], lr=self_play_rate(step, config), config=config)
            )
            if len(seen) == 1:
                _check_gap({**seen[0], **found}, config)
    names = {name for metrics in seen for name in metrics}
    means = {}
    for name in sorted(names):
        values = [metrics[name] for metrics in seen if name in metrics]
        means[name] = sum(values) / len(values)
    first = {name: seen[0][name] for name in ("gap_mean", "gap_max") if name in seen[0]}
    return {**means, **first, **found, "num_optimizer_steps": float(len(seen))}


def rescored(
    learner: Learner, samples: Sequence[Sample], *, config: Config
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with the trainer's log-probs as old ones, and how far the engine's were off."""
    optim, world = config.optim, learner.world
    plan = split_by_tokens([len(s.ids) for s in samples], budget=optim.tokens_per_microbatch)
    batches = even_out(
        [pack([samples[i] for i in places], device=world.device) for places in plan], world
    )
    scored = list(samples)
    tally = TokenMeans(world)
    for number, batch in enumerate(batches):
        with torch.no_grad():
            logprobs_M, _ = batch_logprobs(
                learner, learner.model, batch, temperature=config.rollout.temperature
            )
        gaps_M = (logprobs_M - batch.old_logprobs_M).abs()
        tally.add({"gap_mean": gaps_M}, batch)
        tally.largest("gap_max", gaps_M, batch)
        left = iter(logprobs_M.tolist())
        for i in plan[number] if number < len(plan) else ():
            old = [next(left) if m else 0.0 for m in samples[i].mask]
            scored[i] = replace(samples[i], old_logprobs=old)
    return scored, tally.means()


def _check_gap(metrics: dict[str, float], config: Config) -> None:
    """The whole rollout is the strictest comparison of engine and trainer, and it costs nothing."""
    gap = metrics.get("gap_mean", 0.0)
    if not gap <= config.engine.max_gap:  # NaN is no agreement either
        raise RuntimeError(
            f"engine and trainer log-probs differ by {gap:.4f} nats a token on average over this "
            f"step's games, engine.max_gap is {config.engine.max_gap:g}: the engine does not speak "
            "with the trainer's weights"
        )
