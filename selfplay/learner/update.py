"""The policy update of one rollout, top to bottom: epochs and minibatches, optimizer steps, losses.

The loss of a step has one or more terms: the surrogate on self-play, an auxiliary imitation loss,
the value loss. A term's loss is a sum over its trained tokens, divided by one number of tokens or
samples over all ranks and micro-batches, which is known before the first backward pass. So the
gradient does not depend on how the samples are cut into micro-batches.

Shapes: M trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.advantages.sample import Sample
from selfplay.config import AlgorithmConfig, Config, CriticConfig
from selfplay.config.plugins import function_of, own_call
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, all_reduce_sum, clip_grad_norm, gather_objects
from selfplay.errors import OwnFault, RunEnds, SettingsError
from selfplay.learner.batch import MicroBatch, micro_batches, num_trained_tokens
from selfplay.learner.learner import (
    Learner,
    TokenMeans,
    batch_logprobs,
    batch_values,
    reference_logprobs,
)
from selfplay.learner.loss import (
    aggregation_weights,
    checked_losses,
    clipped_value_loss,
    kl_estimate,
    kl_losses,
)
from selfplay.learner.rescore import (
    MISMATCH_METRICS,
    add_mismatch,
    check_mismatch,
    estimate_values,
    recompute_logprobs,
    with_ess,
)

VALUE_WEIGHT = 0.5  # of the value loss, beside the surrogate


class NonFinite(RunEnds):
    """A loss or a gradient is not finite; this optimizer step has changed no weight."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of an optimizer step's loss: samples, their objective, and its weight. The mean
    imitation loss of the samples named in `chats` is a metric of its own."""

    samples: Sequence[Sample]
    objective: str  # "surrogate" | "imitation" | "value"
    weight: float = 1.0
    chats: frozenset[str] = frozenset()


def update_policy(
    learner: Learner,
    samples: Sequence[Sample],
    auxiliary: Sequence[LossTerm],
    *,
    step: int,
    config: Config,
    max_mismatch: float,
) -> tuple[dict[str, float], list[str]]:
    """All optimizer steps of one rollout: `epochs` passes, each split into `minibatches`.

    Returns metrics averaged over the optimizer steps, and why steps were skipped (a loss or
    gradient that is not finite). The log-prob mismatch of engine and trainer is measured before
    any weight changes: on all samples with recomputed log-probs, else on the first optimizer step's
    (`minibatches`: 1 has all in it). If its mean is above `max_mismatch`, in nats per token, this
    raises EngineDisagrees and no weight changes, as none does at an OwnFault; a SettingsError of a
    loss of one's own comes after some have. Every rank must call.
    """
    rollout_metrics: dict[str, float] = {}
    if config.algorithm.old_logprobs == "recomputed":
        samples, rollout_metrics = recompute_logprobs(learner, samples, config=config)
        check_mismatch(rollout_metrics, max_mismatch)
    if learner.critic is not None:
        samples, value_metrics = estimate_values(learner, samples, config=config)
        rollout_metrics |= value_metrics
    optim = config.optim
    lr = learning_rate(
        step,
        peak=optim.lr,
        num_steps=config.steps,
        warmup_steps=optim.warmup_steps,
        schedule=optim.schedule,
        final_share=optim.final_share,
    )
    per_step, skipped = list[dict[str, float]](), list[str]()
    for minibatch in minibatches(samples, step=step, config=config):
        terms = loss_terms(learner, minibatch, auxiliary, step=step, config=config.critic)
        try:
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
    metrics = _over_steps(per_step, num_skipped=len(skipped), epochs=config.algorithm.epochs)
    return metrics | rollout_metrics, skipped


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int, schedule: str, final_share: float
) -> float:
    """The rate of a step from 0 to num_steps - 1: linear warm-up to `peak`, then constant, or a
    linear or cosine decay to `final_share` of the peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[schedule]
    return peak * (left if schedule == "constant" else final_share + (1.0 - final_share) * left)


def minibatches(samples: Sequence[Sample], *, step: int, config: Config) -> Iterator[list[Sample]]:
    """The minibatches of every epoch. Each epoch shuffles the samples with a named seed."""
    num = config.algorithm.minibatches
    for epoch in range(config.algorithm.epochs):
        order = list(range(len(samples)))
        if num > 1:
            random.Random(named_seed(config.seed, "minibatches", step, epoch)).shuffle(order)
        for first in range(num):
            yield [samples[i] for i in order[first::num]]


def loss_terms(
    learner: Learner,
    minibatch: Sequence[Sample],
    auxiliary: Sequence[LossTerm],
    *,
    step: int,
    config: CriticConfig,
) -> list[LossTerm]:
    """The terms of an optimizer step. With a critic its value loss is one of them, and during the
    critic's warm-up the only one, so the policy does not change."""
    terms = [LossTerm(minibatch, "surrogate"), *auxiliary]
    if learner.critic is None:
        return terms
    value = LossTerm(minibatch, "value", weight=VALUE_WEIGHT)
    return [value] if step < config.warmup_steps else [*terms, value]


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
    and EngineDisagrees for a mean mismatch above `max_mismatch` (None: no check). If all terms are
    value losses, only the critic steps.
    """
    num_tokens, denominators = _global_sizes(terms, config.algorithm, learner.world)
    if not any(num_tokens):
        return {}
    train_policy = any(term.objective != "value" for term in terms)
    try:
        _set_training(learner, True)
        metrics = _backward(learner, terms, denominators, config=config)
        if max_mismatch is not None:
            check_mismatch(metrics, max_mismatch)
        norms = _clip_and_step(
            learner, lr=lr, max_norm=config.optim.max_grad_norm, train_policy=train_policy
        )
    finally:
        _drop_gradients(learner)
        _set_training(learner, False)
    # The value loss uses the same tokens as the surrogate.
    num_policy_tokens = sum(
        num for term, num in zip(terms, num_tokens, strict=True) if term.objective != "value"
    )
    lr = lr if train_policy else 0.0
    return {**metrics, "num_trained_tokens": num_policy_tokens, **norms, "lr": lr}


def _global_sizes(
    terms: Sequence[LossTerm], algorithm: AlgorithmConfig, world: World
) -> tuple[list[float], list[float]]:
    """Each term's number of trained tokens, and the divisor of its summed loss, over all ranks."""
    num_tokens = [float(num_trained_tokens(term.samples)) for term in terms]
    sizes = [denominator(term, algorithm) for term in terms]
    # The ranks of a tensor-parallel group hold the same tokens.
    sums = [total / world.tp for total in all_reduce_sum([*num_tokens, *sizes], world)]
    return sums[: len(terms)], sums[len(terms) :]


def denominator(term: LossTerm, algorithm: AlgorithmConfig) -> float:
    """This rank's contribution, in tokens or samples, to the divisor of the term's summed loss."""
    if term.objective == "surrogate" and algorithm.aggregation != "token_mean":
        return float(sum(any(sample.mask) for sample in term.samples))
    return float(num_trained_tokens(term.samples))


def _backward(
    learner: Learner,
    terms: Sequence[LossTerm],
    denominators: Sequence[float],
    *,
    config: Config,
) -> dict[str, float]:
    """Add up the gradients of all micro-batches; returns the metrics of the losses, means over the
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
            losses_M = term_loss(learner, term, batch, config=config, token_means=token_means)
            losses.append((term.objective, batch, losses_M.detach()))
            # Also of a loss that is not finite: its collectives involve the other ranks.
            (losses_M.sum() * (term.weight / size)).backward()
    metrics = with_ess(token_means.means())
    causes = [cause for of_rank in gather_objects(_not_finite(losses), world) for cause in of_rank]
    if causes:
        raise NonFinite(f"{causes[0]}; no step was taken")
    return metrics


def _not_finite(losses: Sequence[tuple[str, MicroBatch, Tensor]]) -> list[str]:
    """A sentence with the sample's name for each micro-batch (objective, batch, token losses [M])
    with a loss that is not finite.

    Reading a loss waits for the GPU, so this belongs after the last pass is launched.
    """
    if not losses:
        return []
    sentences = []
    finite = torch.stack([torch.isfinite(losses_M).all() for _, _, losses_M in losses]).tolist()
    for all_finite, (objective, batch, losses_M) in zip(finite, losses, strict=True):
        if not all_finite:
            bad = int((~torch.isfinite(losses_M)).nonzero()[0, 0])
            name = batch.names[int(batch.sample_M[bad])]
            sentences.append(f"the {objective} loss of {name} is {losses_M[bad].item()}")
    return sentences


def _clip_and_step(
    learner: Learner, *, lr: float, max_norm: float, train_policy: bool
) -> dict[str, float]:
    """Clip the gradients and step; returns the norms before clipping."""
    world, critic = learner.world, learner.critic
    norms = {"grad_norm": clip_grad_norm(learner.model, max_norm, world)}
    if critic is not None:
        norms["critic_grad_norm"] = clip_grad_norm(critic.module, max_norm, world)
    for norm in norms.values():
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient's norm is {norm}; no step was taken")
    if train_policy:
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        learner.optimizer.step()
    if critic is not None:
        critic.optimizer.step()
    return norms


# --- the loss of a micro-batch --------------------------------------------------------------------


def term_loss(
    learner: Learner,
    term: LossTerm,
    batch: MicroBatch,
    *,
    config: Config,
    token_means: TokenMeans,
) -> Tensor:
    """A micro-batch's weighted token losses [M]; adds its metrics to `token_means`."""
    if term.objective == "surrogate":
        losses_M = _surrogate_loss(learner, batch, config=config, token_means=token_means)
    elif term.objective == "imitation":
        # A teacher's tokens were not sampled, so the rollout's temperature does not apply.
        logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
        losses_M = -batch.advantages_M * logprobs_M  # cross-entropy: their advantage is 1
        token_means.add({"imitation_loss": losses_M}, batch)
        if term.chats:
            named = torch.tensor([name in term.chats for name in batch.names])
            of_chats_M = losses_M[named.to(batch.sample_M.device)[batch.sample_M]]
            token_means.add({"imitation_loss_chats": of_chats_M}, batch)
    else:
        losses_M, cut_M = clipped_value_loss(
            batch_values(learner, batch), batch.values_M, batch.returns_M, clip=config.critic.clip
        )
        token_means.add({"value_loss": losses_M, "value_clip_share": cut_M}, batch)
    # A dummy's advantages are 0, but its KL term is not.
    return losses_M * (not batch.is_dummy)


def _surrogate_loss(
    learner: Learner, batch: MicroBatch, *, config: Config, token_means: TokenMeans
) -> Tensor:
    """The policy loss times importance weights, plus KL and entropy terms; all of it times the
    aggregation weights [M]."""
    algorithm, temperature = config.algorithm, config.rollout.temperature
    logprobs_M, entropies_M = batch_logprobs(
        learner,
        learner.model,
        batch,
        temperature=temperature,
        entropy_grad=algorithm.entropy > 0,
    )
    try:
        with own_call("algorithm.loss", algorithm.loss):
            policy_loss = function_of("algorithm.loss", algorithm.loss)
            losses_M, metrics = checked_losses(policy_loss, logprobs_M, batch, algorithm)
    except OwnFault as fault:  # the pass goes on: its collectives involve the other ranks
        token_means.faults.append(fault)
        losses_M, metrics = 0.0 * logprobs_M, {}
    losses_M = losses_M * batch.importance_M
    metrics = {**metrics, "policy_loss": losses_M, "entropy": entropies_M}
    if algorithm.old_logprobs == "engine":
        add_mismatch(token_means, logprobs_M, batch)
    if learner.reference is not None:
        reference_M = reference_logprobs(learner, batch, temperature=temperature)
        losses_M = losses_M + algorithm.kl * kl_losses(logprobs_M, reference_M, batch, algorithm)
        metrics["kl_reference"] = kl_estimate(logprobs_M, reference_M, estimator="k3")
    if algorithm.entropy:
        losses_M = losses_M - algorithm.entropy * entropies_M
    token_means.add(metrics, batch)
    return losses_M * aggregation_weights(
        batch.sample_M,
        aggregation=algorithm.aggregation,
        constant_length=algorithm.constant_length,
    )


# --- helpers --------------------------------------------------------------------------------------


def _over_steps(
    per_step: Sequence[dict[str, float]], *, num_skipped: int, epochs: int
) -> dict[str, float]:
    """Means over the optimizer steps; the mismatch of the first one; counts."""
    metrics = step_means(per_step)
    for of_step in per_step[:1]:
        metrics |= {name: of_step[name] for name in MISMATCH_METRICS if name in of_step}
    num_tokens = sum(of_step["num_trained_tokens"] for of_step in per_step)
    metrics["num_trained_tokens"] = num_tokens / epochs
    metrics["num_optimizer_steps"] = float(len(per_step))
    if num_skipped:
        metrics["num_skipped_steps"] = float(num_skipped)
    return metrics


def step_means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps that have it."""
    names = sorted({name for of_step in steps for name in of_step})
    had = {name: [of_step[name] for of_step in steps if name in of_step] for name in names}
    return {name: sum(values) / len(values) for name, values in had.items()}


def _set_training(learner: Learner, training: bool) -> None:
    """Dropout acts only in updates."""
    learner.model.train(training)
    if learner.critic is not None:
        learner.critic.module.train(training)


def _drop_gradients(learner: Learner) -> None:
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.critic is not None:
        learner.critic.optimizer.zero_grad(set_to_none=True)
