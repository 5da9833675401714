"""The operations of SGLang's deterministic mode, for the trainer's forward pass (`engine.exact`).

Written for SGLang 0.5.17. Needs a Hopper GPU and FlashAttention 3 (sglang-kernel's flash_ops).
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfplay.engines.sglang.patches import LEAST_QUERIES
from selfplay.model.attention import Span
from selfplay.model.exact import Kernels


def engine_kernels() -> Kernels:
    """Imports SGLang."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func
    from sglang.kernels.ops.activation.activation import silu_and_mul
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as invariant

    def rotate(query_NHW: Tensor, key_NGW: Tensor, cos_sin_NW: Tensor) -> None:
        apply_rope_with_cos_sin_cache_inplace(
            positions=torch.arange(len(cos_sin_NW), device=cos_sin_NW.device),
            q=query_NHW,
            k=key_NGW,
            cos_sin_cache=cos_sin_NW,
            is_neox=True,
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        out_NHW, lse, *_ = flash_attn_varlen_func(
            q,
            k,
            v,
            span.queries_S1,
            span.keys_S1,
            max(span.max_queries, LEAST_QUERIES),
            span.max_keys,
            softmax_scale=span.scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )
        return out_NHW, lse.contiguous()

    return Kernels(
        matmul=lambda x, weight, bias: invariant.matmul_persistent(x, weight.t(), bias=bias),
        norm=invariant.rms_norm_batch_invariant,
        rotate=rotate,
        gate=lambda x: silu_and_mul(x, None),
        attend=attend,
        attend_backward=_attend_backward,
        log_softmax=invariant.log_softmax,
    )


def _attend_backward(
    grad_NHW: Tensor, saved: tuple[Tensor, ...], span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own backward pass; FlashAttention 3's log-sum-exps are laid out as it expects."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_NHW.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_NHW,
        *saved,
        span.queries_S1,
        span.keys_S1,
        span.max_queries,
        span.max_keys,
        0.0,
        True,
        no_dropout,
        grad_NHW.new_empty(0),
        scale=span.scale,
    )
    return grads
