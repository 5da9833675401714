"""The policy update of one rollout, top to bottom: epochs and minibatches, optimizer steps, losses.

The loss of a step has one or more terms: the surrogate on self-play, and the terms of methods. A
term's loss is a sum over its trained tokens, divided by a number of tokens or samples over all
ranks and micro-batches that is known before the first backward pass. So the gradient does not
depend on how the samples are split into micro-batches.

Shapes: M trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from selfplay.advantages.sample import Sample
from selfplay.config import Config, OptimConfig
from selfplay.config.plugins import function_of, own_call
from selfplay.data.seeds import named_seed
from selfplay.distributed import (
    World,
    all_reduce_sum,
    clip_grad_norm,
    gather_objects,
    raise_on_all_ranks,
)
from selfplay.errors import OwnFault, RunEnds, SettingsError
from selfplay.learner.batch import MicroBatch, micro_batches, num_trained_tokens
from selfplay.learner.learner import Learner, TokenMeans, batch_logprobs, reference_logprobs
from selfplay.learner.loss import aggregation_weights, checked_losses, kl_estimate, kl_losses
from selfplay.learner.method import LossTerm, checked_samples, hook_call
from selfplay.learner.rescore import (
    MISMATCH_METRICS,
    Watched,
    check_mismatch,
    mismatch_values,
    with_ess,
)
from selfplay.metrics.records import mean_advantages


class NonFinite(RunEnds):
    """A loss or a gradient is not finite; this optimizer step changed no weight."""


def update_policy(
    learner: Learner,
    samples: Sequence[Sample],
    *,
    step: int,
    config: Config,
    max_mismatch: float,
    watched: Watched | None = None,
) -> tuple[dict[str, float], list[str]]:
    """All optimizer steps of one rollout: `epochs` passes, each split into `minibatches`.

    Returns metrics averaged over the optimizer steps, and why steps were skipped (a loss or
    gradient that is not finite). The log-prob mismatch of engine and trainer is measured before any
    weight changes: on all samples if a method recomputes log-probs, otherwise on the samples of the
    first optimizer step (all of them with `minibatches`: 1). A mean above `max_mismatch`, in nats
    per token, raises EngineDisagrees. That and an OwnFault leave all weights unchanged; a fault in
    custom code after some weights have changed raises SettingsError. Every rank must call.
    """
    rollout_metrics: dict[str, float] = {}
    for method in learner.methods:
        with hook_call(method, learner.world):
            samples, metrics = method.prepare(samples, step=step, config=config)
            samples = checked_samples(samples)
        check_mismatch(metrics, max_mismatch)
        rollout_metrics |= metrics
    watched = watched or Watched(())
    watched.advantages = mean_advantages(samples)
    lr = learning_rate(step, config.optim, num_steps=config.steps)
    per_step, skipped = list[dict[str, float]](), list[str]()
    for minibatch in minibatches(samples, step=step, config=config):
        measured = "mismatch_mean" in rollout_metrics
        terms: Sequence[LossTerm] = [
            surrogate_term(minibatch, config, mismatch=not measured, watched=watched)
        ]
        try:
            for method in learner.methods:
                with hook_call(method, learner.world):
                    terms = method.terms(terms, minibatch, step=step)
            metrics = optimizer_step(
                learner,
                terms,
                lr=lr,
                config=config,
                max_mismatch=None if per_step else max_mismatch,
            )
        except NonFinite as error:
            skipped.append(str(error))
            continue
        except OwnFault as error:
            if not per_step:  # no weight has changed
                raise
            raise SettingsError(f"{error}; this step is not saved") from error
        if metrics:
            per_step.append(metrics)
            watched.changed = True
    metrics = _over_steps(per_step, num_skipped=len(skipped), epochs=config.algorithm.epochs)
    return metrics | rollout_metrics, skipped


def learning_rate(step: int, optim: OptimConfig, *, num_steps: int) -> float:
    """The learning rate of a step from 0 to num_steps - 1: linear warm-up to `optim.lr`, then
    constant, or a linear or cosine decay to `final_share` of it."""
    peak, share, warmup_steps = optim.lr, optim.final_share, optim.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[optim.schedule]
    return peak * (left if optim.schedule == "constant" else share + (1.0 - share) * left)


def minibatches(samples: Sequence[Sample], *, step: int, config: Config) -> Iterator[list[Sample]]:
    """The minibatches of every epoch. Each epoch shuffles the samples with a named seed."""
    num = config.algorithm.minibatches
    for epoch in range(config.algorithm.epochs):
        order = list(range(len(samples)))
        if num > 1:
            random.Random(named_seed(config.seed, "minibatches", step, epoch)).shuffle(order)
        for first in range(num):
            yield [samples[i] for i in order[first::num]]


def optimizer_step(
    learner: Learner,
    terms: Sequence[LossTerm],
    *,
    lr: float,
    config: Config,
    max_mismatch: float | None = None,
) -> dict[str, float]:
    """One gradient step on the sum of the terms' losses.

    Returns metrics averaged over the trained tokens of all ranks. Without a trained token (only
    zero-variance groups) it takes no step and returns {}. Raises, on every rank and before any
    weight changes, NonFinite for a gradient or a loss (with its sample's name) that is not finite,
    EngineDisagrees for a mean mismatch above `max_mismatch` (None: no check), and the first of the
    terms' faults. The policy's weights change only if a term trains it.
    """
    num_tokens, denominators = _global_sizes(terms, learner.world)
    if not any(num_tokens):
        return {}
    train_policy = any(term.trains_policy for term in terms)
    try:
        for part in learner.parts():  # only updates run so; gradient checkpointing needs it
            part.module.train()
        metrics = _backward(learner, terms, denominators, config=config)
        if max_mismatch is not None:
            check_mismatch(metrics, max_mismatch)
        norms = _clip_and_step(
            learner, lr=lr, max_norm=config.optim.max_grad_norm, train_policy=train_policy
        )
    finally:
        for part in learner.parts():
            part.optimizer.zero_grad(set_to_none=True)
            part.module.eval()
    num_policy_tokens = sum(
        num for term, num in zip(terms, num_tokens, strict=True) if term.trains_policy
    )
    lr = lr if train_policy else 0.0
    return {**metrics, "num_trained_tokens": num_policy_tokens, **norms, "lr": lr}


def _global_sizes(terms: Sequence[LossTerm], world: World) -> tuple[list[float], list[float]]:
    """Each term's number of trained tokens and the divisor of its summed loss, over all ranks."""
    num_tokens = [float(num_trained_tokens(term.samples)) for term in terms]
    sizes = [denominator(term) for term in terms]
    # The ranks of a tensor-parallel group hold the same tokens.
    sums = [total / world.tp for total in all_reduce_sum([*num_tokens, *sizes], world)]
    return sums[: len(terms)], sums[len(terms) :]


def denominator(term: LossTerm) -> float:
    """This rank's contribution, in tokens or samples, to the divisor of the term's summed loss."""
    if term.by_sample:
        return float(sum(any(sample.mask) for sample in term.samples))
    return float(num_trained_tokens(term.samples))


def _backward(
    learner: Learner, terms: Sequence[LossTerm], denominators: Sequence[float], *, config: Config
) -> dict[str, float]:
    """Accumulate the gradients of all micro-batches; returns the losses' metrics as means over the
    trained tokens of all ranks. Raises NonFinite on every rank for a loss that is not finite."""
    world, optim = learner.world, config.optim
    token_means, losses = TokenMeans(world), list[tuple[str, MicroBatch, Tensor]]()
    for term, size in zip(terms, denominators, strict=True):
        if size == 0.0:
            continue
        for _, batch in micro_batches(
            term.samples,
            world,
            budget=optim.tokens_per_microbatch,
            share_prefixes=optim.share_prefixes,
        ):
            losses_M, metrics_M = term.objective(learner, batch)
            token_means.add(metrics_M, batch)
            losses_M = losses_M * (not batch.is_dummy)  # its advantages are 0, but its KL is not
            losses.append((term.name, batch, losses_M.detach()))
            # Even if the loss is not finite: its collectives involve the other ranks.
            (losses_M.sum() * (term.weight / size)).backward()
    with raise_on_all_ranks(world):
        for fault in (fault for term in terms for fault in term.faults):
            raise fault
    metrics = with_ess(token_means.means())
    causes = [cause for of_rank in gather_objects(_not_finite(losses), world) for cause in of_rank]
    if causes:
        raise NonFinite(f"{causes[0]}; no step was taken")
    return metrics


def _not_finite(losses: Sequence[tuple[str, MicroBatch, Tensor]]) -> list[str]:
    """A sentence with a sample's name for each micro-batch with a loss that is not finite, given
    its term's name, the micro-batch and its token losses [M].

    Reading a loss waits for the GPU, so this reads once, after the last pass is launched.
    """
    if not losses:
        return []
    sentences = []
    finite = torch.stack([losses_M.isfinite().all() for _, _, losses_M in losses]).tolist()
    for all_finite, (term, batch, losses_M) in zip(finite, losses, strict=True):
        if not all_finite:
            bad = int((~losses_M.isfinite()).nonzero()[0, 0])
            name = batch.names[int(batch.sample_M[bad])]
            sentences.append(f"the {term} loss of {name} is {losses_M[bad].item()}")
    return sentences


def _clip_and_step(
    learner: Learner, *, lr: float, max_norm: float, train_policy: bool
) -> dict[str, float]:
    """Clip the gradients and step; returns the gradient norms before clipping."""
    world = learner.world
    norms = {"grad_norm": clip_grad_norm(learner.model, max_norm, world)}
    for name, trained in learner.method_modules():
        norms[f"{name}_grad_norm"] = clip_grad_norm(trained.module, max_norm, world)
    for norm in norms.values():
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient's norm is {norm}; no step was taken")
    if train_policy:
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        learner.optimizer.step()
    for _, trained in learner.method_modules():
        trained.optimizer.step()
    return norms


# --- the loss of a micro-batch --------------------------------------------------------------------


def imitation(
    learner: Learner, batch: MicroBatch, *, chats: frozenset[str] = frozenset()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy: a teacher's tokens have advantage 1. They were not sampled, so the rollout's
    temperature does not apply. The mean loss of the samples named in `chats` is a separate
    metric."""
    logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
    losses_M = -batch.advantages_M * logprobs_M
    metrics = {"imitation_loss": losses_M}
    if chats:
        named = torch.tensor([name in chats for name in batch.names])
        metrics["imitation_loss_chats"] = losses_M[named.to(batch.sample_M.device)[batch.sample_M]]
    return losses_M, metrics


def imitation_term(samples: Sequence[Sample], world: World, weight: float) -> LossTerm:
    """This rank's part of the imitation loss of samples that every rank has."""
    own = samples[world.dp_rank :: world.dp_size]
    return LossTerm(own, imitation, weight, "imitation")


def surrogate_term(
    samples: Sequence[Sample],
    config: Config,
    *,
    mismatch: bool = True,
    watched: Watched | None = None,
) -> LossTerm:
    """The policy's loss on these samples: `algorithm.loss`, times importance weights if a method
    gives them, plus KL and entropy terms, all times the aggregation weights. With `mismatch` its
    metrics include the mismatch of the policy's and the samples' log-probs."""
    algorithm, temperature = config.algorithm, config.rollout.temperature
    faults = list[OwnFault]()

    def surrogate(learner: Learner, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        entropy_grad = algorithm.entropy > 0
        logprobs_M, entropies_M = batch_logprobs(
            learner, learner.model, batch, temperature=temperature, entropy_grad=entropy_grad
        )
        if watched is not None:
            watched.see(logprobs_M, batch)
        try:
            with own_call("algorithm.loss", algorithm.loss):
                policy_loss = function_of("algorithm.loss", algorithm.loss)
                losses_M, metrics = checked_losses(policy_loss, logprobs_M, batch, algorithm)
        except OwnFault as fault:
            faults.append(fault)
            losses_M, metrics = 0.0 * logprobs_M, {}
        if "importance" in batch.columns:
            losses_M = losses_M * batch.columns["importance"]
        metrics = {**metrics, "policy_loss": losses_M, "entropy": entropies_M}
        if mismatch:
            metrics |= mismatch_values(logprobs_M, batch.old_logprobs_M)
        if learner.reference is not None or "reference" in batch.columns:
            reference_M = reference_logprobs(learner, batch, temperature=temperature)
            kl_M = kl_losses(logprobs_M, reference_M, batch, algorithm)
            losses_M = losses_M + algorithm.kl * kl_M
            metrics["kl_reference"] = kl_estimate(logprobs_M, reference_M, estimator="k3")
        if algorithm.entropy:
            losses_M = losses_M - algorithm.entropy * entropies_M
        return losses_M * aggregation_weights(batch.sample_M, algorithm.aggregation), metrics

    by_sample = algorithm.aggregation != "token_mean"
    return LossTerm(samples, surrogate, name="surrogate", by_sample=by_sample, faults=faults)


# --- helpers --------------------------------------------------------------------------------------


def _over_steps(
    per_step: Sequence[dict[str, float]], *, num_skipped: int, epochs: int
) -> dict[str, float]:
    """Means over the optimizer steps, the mismatch of the first one, and counts."""
    metrics = step_means(per_step)
    for of_step in per_step[:1]:
        metrics |= {name: of_step[name] for name in MISMATCH_METRICS if name in of_step}
    metrics["num_trained_tokens"] = sum(each["num_trained_tokens"] for each in per_step) / epochs
    metrics["num_optimizer_steps"] = float(len(per_step))
    if num_skipped:
        metrics["num_skipped_steps"] = float(num_skipped)
    return metrics


def step_means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps that have it."""
    names = sorted({name for of_step in steps for name in of_step})
    had = {name: [of_step[name] for of_step in steps if name in of_step] for name in names}
    return {name: sum(values) / len(values) for name, values in had.items()}
