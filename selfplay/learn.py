"""All that is learnt from one rollout: its passes and optimizer steps.

Knows no games and no text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.config import Config
from selfplay.data import named_seed
from selfplay.learner import Learner
from selfplay.lora import named_dropout
from selfplay.objective import Part
from selfplay.optim import self_play_rate
from selfplay.ppo import judge, with_values
from selfplay.samples import Sample
from selfplay.scoring import check_gap
from selfplay.update import update

GAPS = ("gap_mean", "gap_max", "gap_kl", "gap_ess")


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
    before any weight moved. Raises EngineDisagrees then, with all weights as they were, when the
    engine did not speak with them.
    """
    algorithm, world = config.algorithm, learner.world
    judged: dict[str, float] = {}
    if learner.critic is not None:
        samples, judged = judge(learner, samples, config=config)
    seen: list[dict[str, float]] = []

    def in_agreement(metrics: Mapping[str, float]) -> None:
        check_gap(metrics, config)

    for epoch in range(algorithm.epochs):
        order = list(range(len(samples)))
        if algorithm.minibatches > 1:
            random.Random(named_seed(config.seed, "minibatches", step, epoch)).shuffle(order)
        for place in range(algorithm.minibatches):
            share = [samples[i] for i in order[place :: algorithm.minibatches]]
            parts = [Part(share, "surrogate"), *replay]
            if learner.critic is not None:
                parts = with_values(parts, share, step=step, config=config)
            draw = (config.seed, step, len(seen))
            with named_dropout(*draw, config=config.model.lora, world=world):
                rate, check = self_play_rate(step, config), None if seen else in_agreement
                one = update(learner, parts, lr=rate, config=config, before_step=check)
            seen.append(one)
    names = {name for metrics in seen for name in metrics}
    means = {}
    for name in sorted(names):
        values = [metrics[name] for metrics in seen if name in metrics]
        means[name] = sum(values) / len(values)
    first = {name: seen[0][name] for name in GAPS if name in seen[0]}
    return {**means, **first, **judged, "num_optimizer_steps": float(len(seen))}
