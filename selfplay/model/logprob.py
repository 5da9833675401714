"""Log-probs of given next tokens, and the entropy there, directly from hidden states.

A batch of M positions over a vocabulary of V would need M x V logits (32k x 152k in fp32: 18 GiB).
They never exist at once: the forward pass iterates over chunks of positions and keeps three numbers
per position; the backward pass iterates over slices of the vocabulary and recomputes the logits it
needs. On a GPU the forward pass of a small model also keeps the gradient of the log-probs by the
logits (KEPT) in the model's dtype, which saves the backward pass that product. All softmax
arithmetic is fp32, all results are in nats.

Shapes: M scored positions, D width of the hidden state, V vocabulary (its local part under tensor
parallel), C a chunk of positions, W a slice of the vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from selfplay.distributed.shard import VocabShard

# Rows of logits start at a multiple of this many elements. Otherwise cuBLAS uses kernels for
# unaligned memory, which take 106 of the 251 ms of a pass of a 0.5B model over 16,384 tokens.
ALIGNMENT = 64
# Logits that exist at once, in elements. The peak is three fp32 buffers of this size and a bf16 one
# in the backward pass: 1.75 GiB on a GPU, where smaller matmuls are slower. On a CPU they should
# fit into the cache.
LIVE_LOGITS = {"cuda": 2**27, "cpu": 2**22}

# The largest number M x V of gradients that are kept from the forward pass, 4 GiB in bf16, and the
# largest width D: the head of a wider model is a smaller part of its work.
KEPT, KEPT_WIDTH = 2**31, 1024

# Hidden states [C, D], weight [V, D], targets [C] and the temperature → the targets' log-probs, the
# entropies and the log-sum-exps of the logits over the temperature, each fp32 [C].
PositionStats = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]


class _Way(NamedTuple):
    """How a pass computes, as the arguments of `token_logprobs`; `keep` is decided."""

    temperature: float
    chunk: int
    entropy_grad: bool
    shard: VocabShard | None
    cap: float | None
    stats: PositionStats | None
    keep: bool


def token_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    temperature: float,
    chunk: int | None = None,
    entropy_grad: bool = False,
    shard: VocabShard | None = None,
    cap: float | None = None,
    stats: PositionStats | None = None,
    keep: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ weight^T / temperature)[target] and that softmax's entropy, fp32 [M].
    With `cap` a logit x is cap * tanh(x / cap) before the temperature.

    Gradients flow to `hidden_MD` and `weight_VD`; through the entropy only if `entropy_grad` is
    set. `chunk` limits the positions whose logits exist at once (default: as many as LIVE_LOGITS
    allows); results do not depend on it. With `shard`, `weight_VD` is this rank's slice of the
    vocabulary; `hidden_MD`, `targets_M`, the results and the gradient of `hidden_MD` are the same
    on every rank. `stats` replaces the forward pass (`selfplay/extras/exact.py`); it supports
    neither `shard` nor `cap`. `keep` says whether the gradients of the logits are kept from the
    forward pass (default: on a GPU, up to KEPT); not with any of `entropy_grad`, `shard`, `cap`,
    `stats`. Raises ValueError for a temperature of 0.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature must be above 0 to score tokens, got {temperature}; score greedy play "
            "at 1.0"
        )
    chunk = chunk or max(1, LIVE_LOGITS[hidden_MD.device.type] // weight_VD.shape[0])
    if entropy_grad or shard is not None or cap is not None or stats is not None:
        keep = False
    elif keep is None:
        num_positions, width = hidden_MD.shape
        few = num_positions * weight_VD.shape[0] <= KEPT and width <= KEPT_WIDTH
        keep = hidden_MD.is_cuda and few and torch.is_grad_enabled()
    way = _Way(float(temperature), chunk, entropy_grad, shard, cap, stats, keep)
    weight_VD = weight_VD.to(hidden_MD.dtype)
    logprobs_M, entropy_M = _TokenLogprobs.apply(hidden_MD, weight_VD, targets_M, way)
    return logprobs_M, entropy_M


class _TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`. z = (capped) logits / temperature, lse = log sum_v exp z_v,
    p = exp(z - lse)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_M: torch.Tensor,
        way: _Way,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Iterate over chunks of positions."""
        rows, shard, stats = weight_VD.shape[0], way.shard, way.stats
        columns_M = targets_M if shard is None else targets_M - shard.start
        here_M = (columns_M >= 0) & (columns_M < rows)
        columns_M = torch.where(here_M, columns_M, -1)
        # Three numbers for each position: log-sum-exp, entropy, and the target's logit (0 if
        # another rank holds the target's row).
        stats_M3 = hidden_MD.new_empty(hidden_MD.shape[0], 3, dtype=torch.float32)
        scale = stats_M3.new_full((), 1.0 / way.temperature)
        top = None if way.cap is None else stats_M3.new_full((), way.cap)
        slopes_MV = weight_VD.new_empty(hidden_MD.shape[0], rows) if way.keep else None
        for start in range(0, hidden_MD.shape[0], way.chunk):
            rows_C = slice(start, start + way.chunk)
            if stats is not None:
                of_chunk = stats(hidden_MD[rows_C], weight_VD, targets_M[rows_C], way.temperature)
                stats_M3[rows_C] = torch.stack(of_chunk, dim=1)
                continue
            logits_CV = _matmul_fp32(hidden_MD[rows_C], weight_VD.t())
            if top is not None:
                logits_CV = fused(_capped, logits_CV)(logits_CV, top)
            lse_C, entropy_C = fused(_row_stats, logits_CV)(logits_CV, scale)
            target_C = logits_CV.gather(1, columns_M[rows_C, None].clamp(min=0))[:, 0]
            target_C = torch.where(here_M[rows_C], target_C * scale, 0.0)
            stats_M3[rows_C] = torch.stack((lse_C, entropy_C, target_C), dim=1)
            if slopes_MV is not None:
                fused(_negative_probs, logits_CV)(logits_CV, lse_C, scale, slopes_MV[rows_C])
                # 1 - p in fp32: rounded to bf16, a p near 1 would leave no gradient.
                rest_C1 = -torch.expm1(target_C - lse_C)[:, None].to(slopes_MV.dtype)
                slopes_MV[rows_C].scatter_(1, columns_M[rows_C, None], rest_C1)
            del logits_CV
        if stats is not None:
            logprobs_M, entropy_M, lse_M = (part_M.clone() for part_M in stats_M3.unbind(1))
        elif shard is None:
            lse_M, entropy_M, target_M = (part_M.clone() for part_M in stats_M3.unbind(1))
            logprobs_M = target_M - lse_M
        else:
            logprobs_M, entropy_M, lse_M = _over_ranks(shard.all_gather(stats_M3))
        ctx.save_for_backward(hidden_MD, weight_VD, columns_M, lse_M, entropy_M, slopes_MV)
        ctx.way, ctx.cap = way, top
        if not way.entropy_grad:
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, grad_logprobs_M: torch.Tensor, grad_entropy_M: torch.Tensor) -> Any:
        """Iterate over slices of the vocabulary instead of chunks of positions.

        Each row of the weight's gradient is then one product over all M, which accumulates in fp32
        and rounds once, without an fp32 buffer [V, D]. The gradient of the hidden states is summed
        over slices in the much smaller fp32 buffer [M, D].
        """
        hidden_MD, weight_VD, columns_M, lse_M, entropy_M, slopes_MV = ctx.saved_tensors
        way: _Way = ctx.way
        if slopes_MV is not None:
            # A position's factor is outside of the sum over the vocabulary, and inside the one over
            # positions.
            factor_M1 = (grad_logprobs_M / way.temperature)[:, None]
            grad_hidden_MD = _matmul_fp32(slopes_MV, weight_VD) * factor_M1
            grad_weight_VD = slopes_MV.t() @ (hidden_MD * factor_M1).to(hidden_MD.dtype)
            return grad_hidden_MD.to(hidden_MD.dtype), grad_weight_VD, None, None
        num_positions, rows = hidden_MD.shape[0], weight_VD.shape[0]
        width = _aligned(max(1, min(rows, way.chunk * rows // max(1, num_positions))))
        grad_hidden_MD = torch.zeros_like(hidden_MD, dtype=torch.float32)
        grad_weight_VD = torch.empty_like(weight_VD)
        scale = lse_M.new_full((), 1.0 / way.temperature)
        for start in range(0, rows, width):
            weight_WD = weight_VD[start : start + width]
            logits_MW = _matmul_fp32(hidden_MD, weight_WD.t())
            if ctx.cap is not None:
                logits_MW = fused(_capped, logits_MW)(logits_MW, ctx.cap)
            grad_MW = fused(_logit_grad, logits_MW)(
                logits_MW,
                columns_M - start,
                lse_M,
                entropy_M,
                grad_logprobs_M,
                grad_entropy_M if way.entropy_grad else None,
                scale,
                ctx.cap,
                weight_VD.dtype,
            )
            del logits_MW
            torch.mm(grad_MW.t(), hidden_MD, out=grad_weight_VD[start : start + width])
            grad_hidden_MD += _matmul_fp32(grad_MW, weight_WD)
        if way.shard is not None:
            grad_hidden_MD = way.shard.all_reduce(grad_hidden_MD)
        return grad_hidden_MD.to(hidden_MD.dtype), grad_weight_VD, None, None


def _over_ranks(stats_RM3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies and log-sum-exps [M] from those of each rank's part of the vocabulary.
    H = sum_r w_r (H_r - log w_r), where w_r is the part's probability and H_r its entropy."""
    lse_RM, entropy_RM, target_RM = stats_RM3.unbind(2)
    lse_M = lse_RM.logsumexp(0)
    log_share_RM = lse_RM - lse_M
    entropy_M = (log_share_RM.exp() * (entropy_RM - log_share_RM)).sum(0)
    return target_RM.sum(0) - lse_M, entropy_M, lse_M


def _aligned(width: int) -> int:
    """The largest multiple of ALIGNMENT up to `width`; `width` itself if that is 0."""
    return width - width % ALIGNMENT or width


def _capped(logits_CV: torch.Tensor, cap: torch.Tensor) -> torch.Tensor:
    return cap * torch.tanh(logits_CV / cap)


def _row_stats(logits_CV: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and entropy of z = scale * logits, both [C]. With y = z - max z the entropy is
    log sum_v exp y_v - sum_v p_v y_v, whose terms are small, so little precision is lost."""
    z_CV = logits_CV * scale
    top_C = z_CV.amax(1)
    y_CV = z_CV - top_C[:, None]
    exp_CV = torch.exp(y_CV)
    sum_C = exp_CV.sum(1)
    log_C = sum_C.log()
    return top_C + log_C, log_C - (exp_CV * y_CV).sum(1) / sum_C


def _negative_probs(
    logits_CV: torch.Tensor, lse_C: torch.Tensor, scale: torch.Tensor, out_CV: torch.Tensor
) -> None:
    """Write -p_v = d logprob_t / d z_v, for every v but t, to `out_CV`, of any dtype."""
    out_CV.copy_(-torch.exp(logits_CV * scale - lse_C[:, None]))


def _logit_grad(
    logits_MW: torch.Tensor,
    columns_M: torch.Tensor,
    lse_M: torch.Tensor,
    entropy_M: torch.Tensor,
    grad_logprobs_M: torch.Tensor,
    grad_entropy_M: torch.Tensor | None,
    scale: torch.Tensor,
    cap: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits of a slice [M, W]; `columns_M` are the targets' columns in it.

    d logprob_t / d z_v = [v = t] - p_v and d H / d z_v = -p_v (log p_v + H), z = scale * logits.
    `logits_MW` are capped already; d capped / d logit = 1 - (capped / cap)^2.
    """
    log_probs_MW = logits_MW * scale - lse_M[:, None]
    per_prob_MW = -grad_logprobs_M[:, None]
    if grad_entropy_M is not None:
        per_prob_MW = per_prob_MW - grad_entropy_M[:, None] * (log_probs_MW + entropy_M[:, None])
    grad_MW = torch.exp(log_probs_MW) * per_prob_MW
    ids_W = torch.arange(logits_MW.shape[1], device=logits_MW.device)
    is_target_MW = ids_W[None, :] == columns_M[:, None]
    grad_MW = torch.where(is_target_MW, grad_MW + grad_logprobs_M[:, None], grad_MW)
    if cap is not None:
        grad_MW = grad_MW * (1.0 - (logits_MW / cap) ** 2)
    return (grad_MW * scale).to(dtype)


def _matmul_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product in fp32, also of half-precision factors: rounding it to bf16, whose step at 10 is
    1/16, would be the largest error of the pass. Autocast would lower the factors' precision."""
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and left.dtype != torch.float32:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.mm(left.float(), right.float())


def fused(function: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
    """The function, compiled on CUDA: one pass over the logits instead of eight for a memory-bound
    chain of elementwise operations. On a CPU compilation would cost a tiny run more time than it
    saves."""
    return _compiled(function) if tensor.is_cuda else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # More than one thread would start a pool of processes that stay after compilation.
    return torch.compile(function, dynamic=True, options={"compile_threads": 1})
