"""All that is learnt from one rollout: its passes, optimizer steps, and the check of the engine.

Knows no games and no text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from selfplay.config import Config
from selfplay.data import named_seed
from selfplay.learner import Learner
from selfplay.objective import Part
from selfplay.optim import self_play_rate
from selfplay.samples import Sample
from selfplay.scoring import score
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
    before any weight moved.
    """
    algorithm = config.algorithm
    samples, found = score(learner, samples, config=config)
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


def _check_gap(metrics: dict[str, float], config: Config) -> None:
    """The whole rollout is the strictest comparison of engine and trainer, and it costs nothing."""
    gap = metrics.get("gap_mean", 0.0)
    if not gap <= config.engine.max_gap:  # NaN is no agreement either
        raise RuntimeError(
            f"engine and trainer log-probs differ by {gap:.4f} nats a token on average over this "
            f"step's games, engine.max_gap is {config.engine.max_gap:g}: the engine does not speak "
            "with the trainer's weights"
        )
