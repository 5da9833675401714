"""The losses, as pure functions over the trained tokens of a micro-batch.

Every function returns per-token values [M]; the caller weighs them (`aggregation`), sums them and
divides by one denominator that all micro-batches and ranks agreed on before the first backward
pass, so the gradient does not depend on how the batch is split.

A policy loss is a function (logprobs_M, batch, algorithm), named by `algorithm.loss`, that returns
per-token losses and metrics: its ratios, and a 0/1 mask of the tokens whose gradient it removes. pi
is the policy being trained, pi_old the one that sampled, r = pi / pi_old, A a token's advantage.
Shapes: M trained tokens of S samples; `sample_M` is the index of each token's sample, and a sample
is never split.

Log-ratios are clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO] before `exp`; a token beyond gets
the ratio at the bound and no gradient. Without the clamp a log-ratio of +99 is an infinite ratio
and a NaN gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dialop.game import is_taken
from selfplay.config import AlgorithmConfig
from selfplay.config.learning import Aggregation
from selfplay.distributed import check_switches, torch_switches
from selfplay.errors import OwnFault
from selfplay.learner.batch import MicroBatch

Losses = tuple[Tensor, dict[str, Tensor]]  # losses [M], metrics [M] by name
LOSS_METRICS = ("ratio_mean", "clip_share")  # metrics of the built-in losses
MAX_LOG_RATIO = 20.0  # nats; exp(20) is 4.9e8. verl clamps log-ratios to the same range


def checked_losses(
    loss: Callable[..., Any], logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> Losses:
    """The result of a policy loss. Raises OwnFault if it is invalid."""
    before = [*_tensors([logprobs_M, batch])]
    versions = [each._version for each in before]  # each change in place increments them
    own = loss.__module__ != __name__  # `.data` and numpy change a tensor but not its version
    copies = [each.detach().clone() for each in before] if own else before
    switches = torch_switches()
    result = loss(logprobs_M, batch, algorithm)
    check_switches(switches)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise OwnFault(f"it must return (losses_M, metrics), got {type(result).__name__}")
    for name, values_M in {"losses_M": result[0], **result[1]}.items():
        is_tensor = isinstance(values_M, Tensor)
        if not is_tensor or values_M.shape != logprobs_M.shape:
            shape = tuple(values_M.shape) if is_tensor else type(values_M).__name__
            wanted = tuple(logprobs_M.shape)
            raise OwnFault(f"{name} must have the shape [M] of logprobs_M, {wanted}, got {shape}")
        if values_M.device != logprobs_M.device:
            raise OwnFault(f"{name} must be on {logprobs_M.device}, got {values_M.device}")
        if name != "losses_M" and name not in LOSS_METRICS and (is_taken(name) or name == "words"):
            raise OwnFault(f"metrics must have new names, got {name!r}, which a run uses already")
    after = [*_tensors([logprobs_M, batch])]
    same = [*map(id, after)] == [*map(id, before)] and versions == [t._version for t in after]
    pairs = zip(after, copies, strict=True) if same and own else ()
    if not (same and all(torch.allclose(*pair, 0.0, 0.0, equal_nan=True) for pair in pairs)):
        raise OwnFault("it must not change its batch")
    if not result[0].requires_grad:
        raise OwnFault("its losses must depend on logprobs_M, got no gradient")
    losses: Losses = result
    return losses


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


def ratio(logs: Tensor) -> Tensor:
    """exp of log-ratios, clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig) -> Losses:
    """PPO's clipped objective, negated: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347 eq. 7, with separate bounds as in arXiv 2503.14476 eq. 10. With `dual_clip` c
    above 1 the loss of a token with A < 0 is at most -c A (dual clip, arXiv 1912.09729), so a token
    that became far more likely cannot outweigh the batch; 0 turns dual clip off. At ratio 1 the
    gradient is REINFORCE's: -A times the gradient of the log-prob.
    """
    ratios_M = ratio(logprobs_M - batch.old_logprobs_M)
    return _clipped(ratios_M, batch.advantages_M, algorithm)


def gspo(logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig) -> Losses:
    """The same clip with one ratio per sequence, s = (product of r over its tokens)^(1 / tokens).

    arXiv 2507.18071 in its token form, eq. 13 and 14: a token's ratio has the value s, and its
    gradient is s times the gradient of the token's log-prob. If the tokens of a sequence share an
    advantage, loss and gradient equal the sequence form (eq. 5 and 7); otherwise each token keeps
    its own. A sequence holds all tokens of one seat in a game.
    """
    sample_M = batch.sample_M
    num_M = torch.bincount(sample_M)[sample_M]
    logs_M = logprobs_M.detach() - batch.old_logprobs_M
    sums_S = logs_M.new_zeros(int(sample_M.max()) + 1).index_add_(0, sample_M, logs_M)
    # exp(x - x.detach()) is 1 and carries the gradient.
    ratios_M = ratio(sums_S[sample_M] / num_M + logprobs_M - logprobs_M.detach())
    return _clipped(ratios_M, batch.advantages_M, algorithm)


def _clipped(ratios_M: Tensor, advantages_M: Tensor, algorithm: AlgorithmConfig) -> Losses:
    """The clipped objective with dual clip of `clipped_surrogate`, for given ratios [M]."""
    low, high, dual_clip = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    clipped_M = ratios_M.clamp(1.0 - low, 1.0 + high)
    losses_M = torch.maximum(-advantages_M * ratios_M, -advantages_M * clipped_M)
    cut_M = torch.where(advantages_M > 0, ratios_M > 1.0 + high, ratios_M < 1.0 - low)
    if dual_clip:
        bounded_M = torch.minimum(losses_M, -dual_clip * advantages_M)
        losses_M = torch.where(advantages_M < 0, bounded_M, losses_M)
        cut_M = cut_M | ((advantages_M < 0) & (ratios_M > dual_clip))
    return losses_M, _metrics(ratios_M, cut_M & (advantages_M != 0))


def cispo(logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig) -> Losses:
    """REINFORCE with a clipped ratio as a constant weight: -clip(r, 1 - low, 1 + high) A log pi.

    arXiv 2506.13585 eq. 4 and 5. Every token keeps its gradient; the mask marks tokens whose weight
    was clipped. The paper has no lower bound, which is `clip_low` 1.
    """
    advantages_M = batch.advantages_M
    ratios_M = ratio(logprobs_M - batch.old_logprobs_M).detach()
    weights_M = ratios_M.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    clipped_M = (weights_M != ratios_M) & (advantages_M != 0)
    return -weights_M * advantages_M * logprobs_M, _metrics(ratios_M, clipped_M)


def reinforce(logprobs_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig) -> Losses:
    """-A log pi (REINFORCE, Williams 1992), as if the policy being trained had sampled the tokens.

    No term corrects for weights that changed since sampling; the ratios are only a metric.
    """
    ratios_M = ratio(logprobs_M - batch.old_logprobs_M)
    return -batch.advantages_M * logprobs_M, _metrics(ratios_M, torch.zeros_like(ratios_M))


def _metrics(ratios_M: Tensor, cut_M: Tensor) -> dict[str, Tensor]:
    """The metrics of LOSS_METRICS [M]; `cut_M` marks tokens whose gradient or weight is clipped."""
    return {"ratio_mean": ratios_M.detach(), "clip_share": cut_M.float()}


def kl_estimate(logprobs_M: Tensor, reference_logprobs_M: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples, in nats.

    Schulman's estimators (joschu.net/blog/kl-approx.html), with d = log pi_ref - log pi: k1 = -d is
    unbiased, k2 = d^2 / 2 is biased with low variance, k3 = exp(d) - 1 - d is unbiased and never
    negative. The means of their gradients differ (docs/kl.md): 0 for k1, the gradient of
    KL(policy || reference) for k2 and that of KL(reference || policy) for k3.

    k3 clamps d to [-MAX_LOG_RATIO, MAX_LOG_RATIO], so it is at most exp(20) - 21 = 4.9e8. verl also
    clamps k3 itself to [-10, 10], which removes the gradient of every token that is more than 13
    times as likely under the reference (d above 2.6), where the KL is largest. Here these tokens
    keep their gradient, and `optim.max_grad_norm` limits the step.
    """
    d_M = reference_logprobs_M - logprobs_M
    if estimator == "k1":
        return -d_M
    if estimator == "k2":
        return 0.5 * d_M.square()
    d_M = d_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_M.exp() - d_M - 1.0


def kl_losses(
    logprobs_M: Tensor, reference_M: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> Tensor:
    """Each token's KL estimate to the reference [M], before its weight.

    An estimator with `_ratio` is multiplied by the ratio pi / pi_old, so that its mean over the old
    policy's samples, and the gradient of that mean, are unbiased for the new policy
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    estimator, _, by_ratio = algorithm.kl_estimator.partition("_")
    kl_M = kl_estimate(logprobs_M, reference_M, estimator=estimator)
    return kl_M * ratio(logprobs_M - batch.old_logprobs_M) if by_ratio else kl_M


def aggregation_weights(sample_M: Tensor, aggregation: Aggregation | int) -> Tensor:
    """The weight of each token's loss [M], before the sum is divided by the global denominator.

    token_mean: 1, over the number of tokens (arXiv 2503.14476 eq. 8). sequence_mean: 1 / tokens of
    the sample, over the number of samples (arXiv 2402.03300 eq. 3). A number n: 1 / n, over the
    number of samples (Dr. GRPO, arXiv 2503.20783, section 3).
    """
    if aggregation == "sequence_mean":
        return 1.0 / torch.bincount(sample_M)[sample_M]
    weight = 1.0 / aggregation if isinstance(aggregation, int) else 1.0
    return torch.full(sample_M.shape, weight, device=sample_M.device)
