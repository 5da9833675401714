"""The engine's forward pass in the trainer (`engine.exact`): equal log-probs, bit for bit.

SGLang's deterministic mode computes each token with kernels whose result does not depend on the
rest of the batch. Here the same kernels (`Kernels`) compute the trainer's forward pass, in the same
order and with the same rounding. For equal weights engine and trainer then agree bit for bit,
whether the engine decoded a token or prefilled it, in packed rows and after shared prefixes.
Backward passes use ordinary kernels, since nothing compares their bits.

Rounding differs from transformers: norms, the rotary embedding and the gate of the MLP round once;
logits are rounded to bf16 before the temperature divides them.

Shapes: N tokens of a row, K of its sequences with their prefixes, S segments, C scored positions, D
width of the model, H query heads, G key/value heads, W width of a head, F of the MLP, V vocabulary.

Written for SGLang 0.5.17. Needs a Hopper GPU and FlashAttention 3 (sglang-kernel's flash_ops).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfplay.engines.sglang.fast.patches import MIN_QUERIES
from selfplay.model.attention import Gather, Span
from selfplay.model.families import head_width
from selfplay.model.logprob import fused

FAMILIES = ("qwen2", "qwen3")
HEAD_WIDTHS = (64, 128)


class Kernels(NamedTuple):
    """The engine's operations (`engine_kernels`)."""

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """x [N, D], weight [F, D], bias [F] or None → [N, F]"""
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """x [N, D], weight [D], eps → RMS norm [N, D]"""
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    """query [N, H, W] and key [N, G, W], changed in place; cosines and sines [N, W] in fp32"""
    gate: Callable[[Tensor], Tensor]
    """x [N, 2F] → silu(first half) * second half"""
    attend: Callable[[Tensor, Tensor, Tensor, Span], tuple[Tensor, Tensor]]
    """query [N, H, W], key and value [K, G, W] → output [N, H, W], log-sum-exp of the scores"""
    attend_backward: Callable[[Tensor, tuple[Tensor, ...], Span], tuple[Tensor, Tensor, Tensor]]
    """gradient of the output; query, key, value, output, log-sum-exp → the first three gradients"""
    log_softmax: Callable[[Tensor], Tensor]
    """x [C, V] in fp32"""


def why_not_exact(config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot match the engine's bits; None if it can."""
    if config.model_type not in FAMILIES:
        return f"the family must be one of {', '.join(FAMILIES)}, got {config.model_type}"
    width = head_width(config)
    if width not in HEAD_WIDTHS:
        return f"a head must be {' or '.join(map(str, HEAD_WIDTHS))} wide, got {width}"
    if set(config.layer_types) != {"full_attention"}:
        return f"every layer must have full attention, got {', '.join(set(config.layer_types))}"
    if (kind := config.rope_parameters["rope_type"]) != "default":
        return f"rope_type must be default, got {kind}"
    return None


def compute_as_engine(model: PreTrainedModel, kernels: Kernels | None = None) -> None:
    """Make the model's layers and log-probs use the engine's operations, SGLang's unless `kernels`
    are given; call it before `shard`."""
    base, kernels = model.base_model, kernels or engine_kernels()
    base.engine_kernels, base.position_stats = kernels, partial(position_stats, kernels=kernels)
    base.forward = MethodType(_model_forward, base)
    for layer in base.layers:
        layer.forward = MethodType(_layer_forward, layer)


class _Pass:
    """The inputs of all layers of a pass. Not a dataclass: FSDP rounds the tensors in a layer's
    arguments, including those in tuples and dataclasses."""

    def __init__(
        self, kernels: Kernels, span: Span, key_tokens: Tensor | None, cos_sin_NW: Tensor
    ) -> None:
        self.kernels, self.span = kernels, span
        self.key_tokens, self.cos_sin_NW = key_tokens, cos_sin_NW


def _model_forward(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_tokens: Tensor | None = None,
    **_: Any,
) -> BaseModelOutputWithPast:
    """The last hidden states of a packed row [1, N] with the arguments of `packed_kwargs`; without
    its bounds each row of `input_ids` is a sequence."""
    num, length = input_ids.shape
    ids_N = input_ids.flatten()
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        position_ids = torch.arange(length, device=ids_N.device).repeat(num)
        cu_seq_lens_q = cu_seq_lens_k = torch.arange(
            0, num * length + 1, length, dtype=torch.int32, device=ids_N.device
        )
        max_length_q = max_length_k = length
    assert position_ids is not None
    width = head_width(self.config)
    run = _Pass(
        self.engine_kernels,
        Span(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, width**-0.5),
        key_tokens,
        _cos_sin(position_ids.flatten(), width, self.config.rope_parameters["rope_theta"]),
    )
    x_ND: Tensor = self.embed_tokens(ids_N)
    for layer in self.layers:
        x_ND = layer(x_ND, run)
    normed_ND = _norm(x_ND, self.norm, run.kernels)
    return BaseModelOutputWithPast(last_hidden_state=normed_ND.view(num, length, -1))


def _cos_sin(positions_N: Tensor, width: int, base: float) -> Tensor:
    """Cosines, then sines, of the positions times the rotary frequencies; fp32 [N, W]."""
    exponents = torch.arange(0, width, 2, dtype=torch.float, device=positions_N.device) / width
    angles = positions_N.float()[:, None] * (1.0 / base**exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _layer_forward(self: Any, x_ND: Tensor, run: _Pass) -> Tensor:
    """The residual stream after a layer [N, D]."""
    kernels, attention, mlp = run.kernels, self.self_attn, self.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    x_NF = _linear(_norm(x_ND, self.input_layernorm, kernels), parts, kernels)
    query, key, value = (
        x.unflatten(1, (-1, attention.head_dim))
        for x in x_NF.split([part.weight.shape[0] for part in parts], dim=1)
    )
    if hasattr(attention, "q_norm"):
        query, key = (
            _norm(x.flatten(0, 1), norm, kernels).view(x.shape)
            for x, norm in ((query, attention.q_norm), (key, attention.k_norm))
        )
    query, key = _Rotate.apply(query, key, run.cos_sin_NW, kernels)
    if run.key_tokens is not None:
        key, value = (Gather.apply(x, run.key_tokens) for x in (key, value))
    heads_NHW = _Attend.apply(query, key, value, run.span, kernels)
    x_ND = x_ND + _linear(heads_NHW.flatten(1), (attention.o_proj,), kernels)
    normed_ND = _norm(x_ND, self.post_attention_layernorm, kernels)
    gated_NF = _Gate.apply(_linear(normed_ND, (mlp.gate_proj, mlp.up_proj), kernels), kernels)
    return x_ND + _linear(gated_NF, (mlp.down_proj,), kernels)


def position_stats(
    hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, temperature: float, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """The targets' log-probs, the entropies and the log-sum-exps of the logits divided by the
    temperature, each fp32 [C]. The log-probs match the engine's; no gradients."""
    logits_CV = kernels.matmul(hidden_CD, weight_VD, None).float()
    logits_CV /= logits_CV.new_full((1, 1), temperature)  # a scalar would multiply by its inverse
    logprobs_CV = kernels.log_softmax(logits_CV)
    logits_C, logprobs_C = (x.gather(1, targets_C[:, None])[:, 0] for x in (logits_CV, logprobs_CV))
    return logprobs_C, fused(_entropy, logits_CV)(logprobs_CV), logits_C - logprobs_C


def _entropy(logprobs_CV: Tensor) -> Tensor:
    return -(logprobs_CV.exp() * logprobs_CV).sum(1)


# --- operations with the engine's forward pass ----------------------------------------------------


def _linear(x_ND: Tensor, layers: tuple[nn.Linear, ...], kernels: Kernels) -> Tensor:
    """The concatenated outputs of linear layers [N, F], in one product as in the engine."""
    weight_FD, bias_F = (_side_by_side(layers, name) for name in ("weight", "bias"))
    out: Tensor = _Linear.apply(x_ND, weight_FD, bias_F, kernels)
    return out


def _side_by_side(layers: tuple[nn.Linear, ...], name: str) -> Tensor | None:
    parts = [getattr(layer, name) for layer in layers]
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return torch.cat(parts)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        ctx.has_bias = bias_F is not None
        return kernels.matmul(x_ND.contiguous(), weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        bias = grad_NF.sum(0) if ctx.has_bias else None
        return grad_NF @ weight_FD, grad_NF.t() @ x_ND, bias, None


def _norm(x_ND: Tensor, norm: Any, kernels: Kernels) -> Tensor:
    out: Tensor = _Norm.apply(x_ND, norm.weight, norm.variance_epsilon, kernels)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x_ND, weight_D)
        ctx.eps = eps
        return kernels.norm(x_ND.contiguous(), weight_D, eps)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D = ctx.saved_tensors
        grad_x, grad_weight = fused(_norm_grad, x_ND)(grad_ND, x_ND.float(), weight_D, ctx.eps)
        return grad_x.to(x_ND.dtype), grad_weight, None, None


def _norm_grad(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """With r = (mean x^2 + eps)^-1/2 and y = r x, the norm is w y and its gradient is
    r (w g - y mean(w g y))."""
    inverse_N1 = torch.rsqrt(x_ND.pow(2).mean(-1, keepdim=True) + eps)
    y_ND, grad_ND = x_ND * inverse_N1, grad_ND.float()
    to_y_ND = grad_ND * weight_D.float()
    grad_x_ND = inverse_N1 * (to_y_ND - y_ND * (to_y_ND * y_ND).mean(-1, keepdim=True))
    return grad_x_ND, (grad_ND * y_ND).sum(0).to(weight_D.dtype)


class _Rotate(torch.autograd.Function):
    """The rotary embedding; its backward pass rotates the other way."""

    @staticmethod
    def forward(
        ctx: Any, query_NHW: Tensor, key_NGW: Tensor, cos_sin_NW: Tensor, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_sin_NW)
        query_NHW, key_NGW = (
            x.clone(memory_format=torch.contiguous_format) for x in (query_NHW, key_NGW)
        )
        kernels.rotate(query_NHW, key_NGW, cos_sin_NW)
        return query_NHW, key_NGW

    @staticmethod
    def backward(ctx: Any, grad_NHW: Tensor, grad_NGW: Tensor) -> tuple[Tensor | None, ...]:
        (cos_sin_NW,) = ctx.saved_tensors
        back = fused(_rotated_back, grad_NHW)
        return back(grad_NHW, cos_sin_NW), back(grad_NGW, cos_sin_NW), None, None


def _rotated_back(grad_NHW: Tensor, cos_sin_NW: Tensor) -> Tensor:
    cos, sin = cos_sin_NW[:, None].chunk(2, dim=-1)
    a, b = grad_NHW.float().chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).to(grad_NHW.dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N2F: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x_N2F)
        return kernels.gate(x_N2F)

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        (x_N2F,) = ctx.saved_tensors
        return fused(_gate_grad, x_N2F)(grad_NF, x_N2F), None


def _gate_grad(grad_NF: Tensor, x_N2F: Tensor) -> Tensor:
    gate, up = x_N2F.float().chunk(2, dim=-1)
    grad, share = grad_NF.float(), torch.sigmoid(gate)
    to_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    return torch.cat((to_gate, grad * gate * share), dim=-1).to(x_N2F.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHW: Tensor,
        key_KGW: Tensor,
        value_KGW: Tensor,
        span: Span,
        kernels: Kernels,
    ) -> Tensor:
        value_KGW = value_KGW.contiguous()
        out_NHW, lse = kernels.attend(query_NHW, key_KGW, value_KGW, span)
        ctx.save_for_backward(query_NHW, key_KGW, value_KGW, out_NHW, lse)
        ctx.span, ctx.kernels = span, kernels
        return out_NHW

    @staticmethod
    def backward(ctx: Any, grad_NHW: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = ctx.kernels.attend_backward(grad_NHW.contiguous(), saved, ctx.span)
        return *grads, None, None


# --- SGLang's kernels -----------------------------------------------------------------------------


def engine_kernels() -> Kernels:
    """The operations of SGLang's deterministic mode. Imports SGLang."""
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
            max(span.max_queries, MIN_QUERIES),
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
    """Torch's own backward pass; FlashAttention 3's log-sum-exps have the layout it expects."""
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
