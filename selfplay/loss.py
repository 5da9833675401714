"""The losses, as pure functions over the trained tokens of a micro-batch.

Every function returns per-token values [M]; the caller sums them and divides by one denominator
that all micro-batches and ranks agreed on before the first backward pass, so the gradient does not
depend on how the batch was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped objective, negated (arXiv 1707.06347 eq. 7), with separate bounds (arXiv
    2503.14476 eq. 10).

    Returns per-token losses, ratios, and a 0/1 mask of tokens whose gradient the clip removed. At
    ratio 1 the gradient is REINFORCE's: -advantage times the gradient of the log-prob.
    """
    ratios_M = (logprobs_M - old_logprobs_M).exp()
    clipped_M = ratios_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses_M = torch.maximum(-advantages_M * ratios_M, -advantages_M * clipped_M)
    cut_M = torch.where(advantages_M > 0, ratios_M > 1.0 + clip_high, ratios_M < 1.0 - clip_low)
    return losses_M, ratios_M.detach(), (cut_M & (advantages_M != 0)).float()


def kl_k3(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference): exp(d) - d - 1, where d = reference - policy
    log-prob.

    Schulman's k3 (joschu.net/blog/kl-approx.html): unbiased for samples of the policy, never
    negative.
    """
    d_M = reference_logprobs_M - logprobs_M
    return d_M.exp() - d_M - 1.0


def imitation(logprobs_M: Tensor, weights_M: Tensor) -> Tensor:
    """Cross-entropy of the teacher's tokens: minus the log-prob, weighted."""
    return -weights_M * logprobs_M
