"""One optimizer step: micro-batches forward and backward, one denominator, one clipped AdamW step.

Several parts may share a step (the surrogate on self-play, imitation replay); each part's loss is
the sum over its trained tokens divided by their number over all ranks and micro-batches, agreed
before the first backward pass. Knows no games and no text.

Shapes: M trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfplay.advantages import Sample
from selfplay.batch import MicroBatch, micro_batches, num_trained_tokens, pack, split_by_tokens
from selfplay.config import Config, OptimConfig
from selfplay.data import named_seed
from selfplay.loss import clipped_surrogate, imitation, kl_k3
from selfplay.model import policy_logprobs
from selfplay.parallel import World, all_reduce_max, all_reduce_sum, clip_grad_norm


@dataclass(slots=True)
class Learner:
    """What an update changes (model, optimizer) and what it only reads (reference, world)."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    world: World
    compute_dtype: torch.dtype
    reference: PreTrainedModel | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a step's loss: these samples under one objective, times a weight."""

    samples: Sequence[Sample]
    objective: str  # "surrogate" | "imitation"
    weight: float = 1.0


def make_optimizer(model: PreTrainedModel, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only; its step is one fused kernel."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        fused=True,
    )


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int, schedule: str, final_share: float
) -> float:
    """The rate of step 0..num_steps-1: linear warm-up to the peak, then constant, or linear or
    cosine down to its share."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[schedule]
    return peak * (left if schedule == "constant" else final_share + (1.0 - final_share) * left)


def self_play_rate(step: int, config: Config) -> float:
    """The learning rate of a self-play step."""
    return learning_rate(
        step,
        peak=config.optim.lr,
        num_steps=config.steps,
        warmup_steps=config.optim.warmup_steps,
        schedule=config.optim.schedule,
        final_share=config.optim.final_share,
    )


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
    tally = _Tally(world)
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


def update(
    learner: Learner,
    parts: Sequence[Part],
    *,
    lr: float,
    config: Config,
) -> dict[str, float]:
    """One gradient step on the sum of the parts' losses.

    Returns metrics averaged over trained tokens of all ranks. With no trained token anywhere
    nothing happens (every group was flat). A loss that is not finite raises FloatingPointError
    before the step, with the sample's name.
    """
    world = learner.world
    counts = [float(num_trained_tokens(part.samples)) for part in parts]
    totals = [
        total / world.tp for total in all_reduce_sum(counts, world)
    ]  # tp ranks hold the same tokens
    if not any(totals):
        return {"num_trained_tokens": 0.0}
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    learner.model.train()
    tally = _Tally(world)
    for part, total in zip(parts, totals, strict=True):
        if total == 0.0:
            continue
        for batch in _even_micro_batches(part.samples, config.optim, world):
            loss = _part_loss(learner, part, batch, config=config, tally=tally)
            (loss * (part.weight / total)).backward()
    grad_norm = clip_grad_norm(learner.model, config.optim.max_grad_norm, world)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"the gradient's norm is {grad_norm}; the step was not taken")
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return {"num_trained_tokens": sum(totals), "grad_norm": grad_norm, "lr": lr, **tally.means()}


def _even_micro_batches(
    samples: Sequence[Sample], optim: OptimConfig, world: World
) -> list[MicroBatch]:
    """This rank's micro-batches, and weightless ones so that all ranks meet in every collective."""
    batches = micro_batches(samples, budget=optim.tokens_per_microbatch, device=world.device)
    return even_out(batches, world)


def even_out(batches: list[MicroBatch], world: World) -> list[MicroBatch]:
    """As many micro-batches as the busiest rank has, the missing ones weightless."""
    most = int(all_reduce_max(float(len(batches)), world))
    if len(batches) < most:
        filler = Sample(
            name="", ids=[0, 0], mask=[0, 1], old_logprobs=[0.0, 0.0], advantages=[0.0, 0.0]
        )
        return batches + [pack([filler], device=world.device)] * (most - len(batches))
    return batches


def _is_filler(batch: MicroBatch) -> bool:
    return batch.names == ("",)


def batch_logprobs(
    learner: Learner, model: PreTrainedModel, batch: MicroBatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the trained tokens and entropies at their places, both [M], at `temperature`."""
    # With a mesh FSDP computes in bf16 by itself; one CPU process gets the same by autocast.
    lowered = learner.world.mesh is None and learner.compute_dtype != torch.float32
    with torch.autocast(learner.world.device.type, learner.compute_dtype, enabled=lowered):
        return policy_logprobs(
            model,
            batch.ids_N,
            batch.positions_N,
            batch.cu_seqlens_S1,
            batch.max_seqlen,
            batch.predict_M,
            batch.targets_M,
            temperature=temperature,
        )


def _part_loss(
    learner: Learner, part: Part, batch: MicroBatch, *, config: Config, tally: _Tally
) -> Tensor:
    """The sum of a micro-batch's token losses; counts its metrics."""
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
    if not bool(torch.isfinite(losses_M).all()):
        bad = int((~torch.isfinite(losses_M)).nonzero()[0, 0])
        name = batch.names[int(batch.sample_M[bad])]
        raise FloatingPointError(
            f"the {part.objective} loss of {name} is {losses_M[bad].item()}; no step was taken"
        )
    tally.add(seen, batch)
    # A filler's advantage is 0, but its KL term is not.
    return losses_M.sum() * (0.0 if _is_filler(batch) else 1.0)


class _Tally:
    """Sums of per-token metrics over micro-batches; their means over all ranks at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def add(self, values: dict[str, Tensor], batch: MicroBatch) -> None:
        real = 0.0 if _is_filler(batch) else 1.0
        for name, values_M in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + real * float(values_M.detach().sum())
            self._counts[name] = self._counts.get(name, 0.0) + real * values_M.numel()

    def largest(self, name: str, values_M: Tensor, batch: MicroBatch) -> None:
        value = 0.0 if _is_filler(batch) else float(values_M.max())
        self._largest[name] = max(self._largest.get(name, 0.0), value)

    def means(self) -> dict[str, float]:
        names = sorted(self._sums)  # every rank made the same micro-batch kinds, so the names agree
        sums = all_reduce_sum([self._sums[n] for n in names], self._world)
        counts = all_reduce_sum([self._counts[n] for n in names], self._world)
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        return means | {
            n: all_reduce_max(self._largest[n], self._world) for n in sorted(self._largest)
        }
