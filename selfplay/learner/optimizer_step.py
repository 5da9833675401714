"""One optimizer step: micro-batches forward and backward, one denominator, one clipped AdamW step.

Several parts may share a step (the surrogate on self-play, imitation replay); each part's loss is
a sum over its trained tokens divided by one number (of tokens or of sequences) over all ranks and
micro-batches, agreed before the first backward pass. Knows no games and no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from selfplay.config import OptimConfig
from selfplay.credit.sample import Sample
from selfplay.distributed import World, all_reduce_sum, clip_grad_norm
from selfplay.learner.batch import MicroBatch, micro_batches, num_weighed_tokens
from selfplay.learner.learner import Learner, UpdateSettings, even_out
from selfplay.learner.mismatch import EngineDisagrees, mismatch_metrics
from selfplay.learner.objective import Part, denominator, part_loss
from selfplay.learner.token_means import TokenMeans


def optimizer_step(
    learner: Learner,
    parts: Sequence[Part],
    *,
    lr: float,
    settings: UpdateSettings,
    before_step: Callable[[Mapping[str, float]], None] | None = None,
) -> dict[str, float]:
    """One gradient step on the sum of the parts' losses.

    `before_step`, where given, is told the metrics before any weight moves; no step is taken when
    it raises EngineDisagrees.

    Returns metrics averaged over trained tokens of all ranks. With no trained token anywhere
    nothing happens (every group was flat, or every token rejected). A loss that is not finite
    raises FloatingPointError before the step, with the sample's name. If only values are learnt,
    the policy takes no step.
    """
    world = learner.world
    counts = [float(num_weighed_tokens(part.samples)) for part in parts]
    sizes = [denominator(part, settings.algorithm) for part in parts]
    # tp ranks hold the same tokens
    sums = [total / world.tp for total in all_reduce_sum([*counts, *sizes], world)]
    counts, sizes = sums[: len(parts)], sums[len(parts) :]
    if not any(counts):
        return {"num_trained_tokens": 0.0}
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    learner.model.train()
    if learner.critic is not None:
        learner.critic.module.train()
    tally = TokenMeans(world)
    for part, count, size in zip(parts, counts, sizes, strict=True):
        if count == 0.0:
            continue
        for batch in _even_micro_batches(part.samples, settings.optim, world):
            loss = part_loss(learner, part, batch, settings=settings, tally=tally)
            (loss * (part.weight / size)).backward()
    seen = mismatch_metrics(tally.means())
    if before_step is not None:
        try:
            before_step(seen)
        except EngineDisagrees:
            _drop_gradients(learner)
            learner.model.eval()
            raise
    train_policy = any(part.objective != "value" for part in parts)
    norms = _step(learner, max_norm=settings.optim.max_grad_norm, train_policy=train_policy)
    learner.model.eval()  # elsewhere dropout would be noise in what is measured
    # The critic's part looks at the very tokens that the surrogate counts.
    spoken = sum(n for part, n in zip(parts, counts, strict=True) if part.objective != "value")
    lr = lr if train_policy else 0.0
    return {"num_trained_tokens": spoken, **norms, "lr": lr, **seen}


def _step(learner: Learner, *, max_norm: float, train_policy: bool) -> dict[str, float]:
    """End the backward passes and step; the norms that the gradients had."""
    world, critic = learner.world, learner.critic
    norms = {"grad_norm": clip_grad_norm(learner.model, max_norm, world)}
    if critic is not None:
        norms["critic_grad_norm"] = clip_grad_norm(critic.module, max_norm, world)
    for norm in norms.values():
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}; the step was not taken")
    if train_policy:
        learner.optimizer.step()
    if critic is not None:
        critic.optimizer.step()
    _drop_gradients(learner)
    return norms


def _drop_gradients(learner: Learner) -> None:
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.critic is not None:
        learner.critic.optimizer.zero_grad(set_to_none=True)


def _even_micro_batches(
    samples: Sequence[Sample], optim: OptimConfig, world: World
) -> list[MicroBatch]:
    """This rank's micro-batches, and weightless ones so that all ranks meet in every collective."""
    batches = micro_batches(samples, budget=optim.tokens_per_microbatch, device=world.device)
    return even_out(batches, world)
