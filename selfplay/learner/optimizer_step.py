"""One optimizer step: micro-batches forward and backward, one denominator, one clipped AdamW step.

Several parts may share a step: the surrogate on self-play, an auxiliary imitation loss, the value
loss. Each part's loss is a sum over its trained tokens, divided by one number of tokens or samples
over all ranks and micro-batches, which is known before the first backward pass. Knows no games and
no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from selfplay.distributed import all_reduce_sum, clip_grad_norm, gather_objects
from selfplay.errors import RunEnds
from selfplay.learner.batch import MicroBatch, micro_batches, num_weighed_tokens, split
from selfplay.learner.learner import Learner, TokenMeans, UpdateSettings, even_out
from selfplay.learner.mismatch import mismatch_metrics
from selfplay.learner.objective import Part, denominator, not_finite, part_loss


class NonFinite(RunEnds):
    """A loss or a gradient is not finite; this optimizer step has changed no weight."""


def optimizer_step(
    learner: Learner,
    parts: Sequence[Part],
    *,
    lr: float,
    settings: UpdateSettings,
    before_step: Callable[[Mapping[str, float]], None] | None = None,
) -> dict[str, float]:
    """One gradient step on the sum of the parts' losses.

    `before_step` is called with the metrics before any weight changes; if it raises
    EngineDisagrees, no step is taken.

    Returns metrics averaged over the trained tokens of all ranks. Without a trained token (only
    zero-variance groups, or every token rejected) it takes no step and returns {}. Raises NonFinite
    on every rank, before the step, for a gradient or a loss (with its sample's name) that is not
    finite. If all parts are value losses, only the critic steps.
    """
    world = learner.world
    counts = [float(num_weighed_tokens(part.samples)) for part in parts]
    sizes = [denominator(part, settings.algorithm) for part in parts]
    # The ranks of a tensor-parallel row hold the same tokens.
    sums = [total / world.tp for total in all_reduce_sum([*counts, *sizes], world)]
    counts, sizes = sums[: len(parts)], sums[len(parts) :]
    if not any(counts):
        return {}
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    learner.model.train()
    if learner.critic is not None:
        learner.critic.module.train()
    tally, losses = TokenMeans(world), list[tuple[str, MicroBatch, Tensor]]()
    budget, share = settings.optim.tokens_per_microbatch, settings.optim.share_prefixes
    for part, count, size in zip(parts, counts, sizes, strict=True):
        if count == 0.0:
            continue
        plan = even_out(split(part.samples, budget=budget, share=share), world)
        for batch in micro_batches(part.samples, plan, device=world.device, share=share):
            losses_M = part_loss(learner, part, batch, settings=settings, tally=tally)
            losses.append((part.objective, batch, losses_M.detach()))
            # Also of a loss that is not finite: its collectives involve the other ranks.
            (losses_M.sum() * (part.weight / size)).backward()
    means = mismatch_metrics(tally.means())
    train_policy = any(part.objective != "value" for part in parts)
    try:
        causes = [cause for part in gather_objects(not_finite(losses), world) for cause in part]
        if causes:
            raise NonFinite(f"{causes[0]}; no step was taken")
        if before_step is not None:
            before_step(means)
        norms = _step(learner, max_norm=settings.optim.max_grad_norm, train_policy=train_policy)
    finally:
        _drop_gradients(learner)
        learner.model.eval()  # no dropout outside of updates
    # The value loss uses the same tokens as the surrogate.
    num_tokens = sum(n for part, n in zip(parts, counts, strict=True) if part.objective != "value")
    lr = lr if train_policy else 0.0
    return {"num_trained_tokens": num_tokens, **norms, "lr": lr, **means}


def _step(learner: Learner, *, max_norm: float, train_policy: bool) -> dict[str, float]:
    """Clip the gradients and step; returns the norms before clipping."""
    world, critic = learner.world, learner.critic
    norms = {"grad_norm": clip_grad_norm(learner.model, max_norm, world)}
    if critic is not None:
        norms["critic_grad_norm"] = clip_grad_norm(critic.module, max_norm, world)
    for norm in norms.values():
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient's norm is {norm}; no step was taken")
    if train_policy:
        learner.optimizer.step()
    if critic is not None:
        critic.optimizer.step()
    return norms


def _drop_gradients(learner: Learner) -> None:
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.critic is not None:
        learner.critic.optimizer.zero_grad(set_to_none=True)
