"""Packed rows, and causal attention over them in transformers, under the name "packed".

A packed row is the input of one forward pass, without padding: S segments back to back. Without
shared prefixes a segment is a sequence. With them, a segment is the part of a sequence that follows
a prefix shared with an earlier sequence of the row; the tokens of the prefix are in earlier
segments. So each token is computed once, however many sequences contain it.

When a model built with `attn_implementation="packed"` is called with the `packed_kwargs` of a row,
each token attends to the tokens of its own sequence up to itself. If sequences share a prefix, the
queries are the segment's tokens and the keys belong to the complete sequence, gathered from the
row, with the causal mask aligned at their common end. So keys are gathered again for each sequence;
queries, projections and everything outside attention are computed once. The first of these kernels
that can run is used:

1. flash-attn-4 (Hopper, bf16 or fp16, if the package is installed),
2. torch's own `varlen_attn` (CUDA, bf16 or fp16),
3. scaled dot-product attention on length-sorted padded chunks (CPU, or fp32).

flash-attn-4 is compiled for each kind of heads, once per machine: its kernels are kept in
`KERNELS`. Before first use it is compared with the third kernel on a small row, forward and
backward (`_flash_fits`).

A model that caps its attention scores (Gemma-2) uses flash-attn-4 if it can run, otherwise an
explicit softmax, which materializes all scores [C, H, L, L]. Values narrower than the keys
(DeepSeek) are padded.

Without `packed_kwargs`, as in generation with a key-value cache, transformers' sdpa attention runs:
an explicit 4-D mask is restricted to the layer's sliding window, and a 2-D padding mask is expanded
as usual. Keys must then be in the order of their positions, without gaps.

Shapes: N tokens of the row, K of its sequences with their prefixes (N without any), S segments, M
positions whose next token is scored, C segments of a chunk, Q its longest, L its longest sequence,
H query heads, G key/value heads, D width of a head, W = H * D.
"""

from __future__ import annotations

import inspect
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.constants import HF_HOME
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dialop.shown import error_line

NAME = "packed"
HALF_DTYPES = (torch.bfloat16, torch.float16)
# In the padded fallback, each segment of a chunk has at least this share of the longest segment's
# length, so at most half of the queries are padding. The lengths of the complete sequences differ
# from the first one's by at most this factor, so at most three quarters of the keys are padding.
MIN_FILL = 0.5
# The largest accepted relative error of flash-attn-4 in bf16. On an H100 it is 0.003; a missing
# window or a wrong mask causes a far larger one.
MAX_ERROR = 0.02
KERNELS = Path(HF_HOME) / "selfplay-flash-attn"  # compiled kernels, by version of the package


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The complete sequences of a row whose segments share prefixes.

    `tokens_K` (int64) are the row indices of each sequence's tokens, sequence after sequence.
    `cu_seqlens_S1` (int32) are the bounds of the sequences in it, `max_seqlen` the longest length.
    """

    tokens_K: torch.Tensor
    cu_seqlens_S1: torch.Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The input of one forward pass.

    `ids_N` and `positions_N` (int64): token ids and their positions in their sequence.
    `cu_seqlens_S1` (int32): the segments' starts and the end, `max_seqlen` the longest length.
    `predict_M` (int64): the indices in N whose next token is scored. An index that several
    sequences share may occur several times.
    """

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    cu_seqlens_S1: torch.Tensor
    max_seqlen: int
    predict_M: torch.Tensor
    prefixes: Prefixes | None = None


def register_packed_attention() -> None:
    """Make "packed" a valid `attn_implementation`. Idempotent."""
    AttentionInterface.register(NAME, _packed_attention)
    # Without a mask builder of the same name transformers silently drops 2-D padding masks.
    # `packed_kwargs` passes a 4-D placeholder, which transformers leaves unchanged, so packed mode
    # never builds a mask.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_backend(device: torch.device | str, dtype: torch.dtype) -> str:
    """The kernel of packed attention: "flash-attn-4" (for heads that it supports), "torch-varlen"
    or "sdpa"."""
    if torch.device(device).type != "cuda" or dtype not in HALF_DTYPES:
        return "sdpa"
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "torch-varlen" if not hopper or _flash_attn() is None else "flash-attn-4"


def packed_kwargs(row: PackedRow) -> dict[str, Any]:
    """The arguments of a model's forward for packed attention, besides ids and positions."""
    keys = row.prefixes or row
    return {
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.ids_N.device),
        "cu_seq_lens_q": row.cu_seqlens_S1,
        "cu_seq_lens_k": keys.cu_seqlens_S1,
        "max_length_q": row.max_seqlen,
        "max_length_k": keys.max_seqlen,
        "key_tokens": None if row.prefixes is None else row.prefixes.tokens_K,
    }


@dataclass(frozen=True, slots=True)
class Span:
    """The arguments of a varlen kernel besides the heads: the bounds of queries and keys, the
    maximum length of each, the scale of the scores, the sliding window, and the cap of the scores.
    """

    queries_S1: torch.Tensor
    keys_S1: torch.Tensor
    max_queries: int
    max_keys: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.queries_S1, self.keys_S1, self.max_queries, self.max_keys


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_tokens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Has transformers' signature: query [1, H, N, D], key, value [1, G, N, D] → [1, N, H, D].

    Raises ValueError for attention sinks (`s_aux`) and for dropout, which no kernel here supports,
    and if only the placeholder of `packed_kwargs` arrives.
    """
    if s_aux is not None:
        raise ValueError("packed attention does not support attention sinks (s_aux)")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if cu_seq_lens_q is None:
        if attention_mask is not None and attention_mask.numel() == 1 < key.shape[2]:
            raise ValueError(
                "the model's layers do not pass the bounds of packed sequences to attention"
            )
        mask = _within_window(query, key, attention_mask, sliding_window)
        if softcap is not None:
            if mask is None:
                mask = _distance(query.shape[2], key.shape[2], query.device) >= 0
            out = _explicit(query, key, value, mask, scale, softcap)
            return out.transpose(1, 2).contiguous(), None
        if query.shape[2] == 1 and not dropout:
            # Heads that share keys become queries of one head, so that no key has to be copied.
            query_BGHD = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
            out = scaled_dot_product_attention(query_BGHD, key, value, mask, scale=scale)
            return out.reshape(len(query), 1, query.shape[1], -1), None
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise ValueError(f"attention dropout must be 0 in packed rows, got {dropout}")
    assert cu_seq_lens_k is not None and max_length_q is not None and max_length_k is not None
    assert query.shape[0] == 1
    width = value.shape[-1]
    # [1, heads, N, D] → [N, heads, D]: the varlen kernels only need a last stride of 1. Not x[0],
    # whose gradient would be copied into zeros in another order, and back by the layer's views.
    query_NHD, key_KGD, value_KGD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if key_tokens is not None:
        key_KGD, value_KGD = (Gather.apply(x, key_tokens) for x in (key_KGD, value_KGD))
    if width < key.shape[-1]:
        value_KGD = pad(value_KGD, (0, key.shape[-1] - width))
    span = Span(
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale,
        sliding_window if sliding_window and sliding_window < max_length_k else None,
        softcap,
    )
    backend = attention_backend(query.device, query.dtype)
    groups = query.shape[1] // key.shape[1]
    windowed = span.window is not None
    heads = _Heads(query.device, query.dtype, groups, key.shape[-1], windowed, softcap)
    if backend == "flash-attn-4" and _flash_fits(heads):
        attend = _flash
    else:
        attend = _padded if backend == "sdpa" or softcap is not None else _varlen
    return attend(query_NHD, key_KGD, value_KGD, span)[..., :width].unsqueeze(0), None


class Gather(torch.autograd.Function):
    """Rows `x_N...[index_K]`. The gradient of a row that is gathered several times is summed in
    fp32 for any dtype."""

    @staticmethod
    def forward(ctx: Any, x_N: torch.Tensor, index_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_K)
        ctx.num_rows = len(x_N)
        return x_N.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, grad_K: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_K,) = ctx.saved_tensors
        grad_N = grad_K.new_zeros(ctx.num_rows, *grad_K.shape[1:], dtype=torch.float32)
        return grad_N.index_add_(0, index_K, grad_K.float()).to(grad_K.dtype), None


def _distance(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """The distance in positions from each query (the last tokens) back to each key [Q, K]."""
    positions_K = torch.arange(num_keys, device=device)
    return positions_K[num_keys - num_queries :, None] - positions_K[None, :]


def _within_window(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, window: int | None
) -> torch.Tensor | None:
    """The boolean mask restricted to this layer's window.

    transformers passes an explicit mask to all layers and ignores their windows.
    """
    if not window or key.shape[2] <= window:
        return mask
    distance_QK = _distance(query.shape[2], key.shape[2], query.device)
    near_QK = distance_QK < window
    if mask is None:
        return (near_QK & (distance_QK >= 0))[None, None]
    return mask & near_QK


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention with softmax(softcap * tanh(scores / softcap)) in fp32 → [C, H, Q, D]. As in the
    kernels, scores of half-precision heads are not rounded to their dtype, even under autocast.

    query [C, H, Q, D], key and value [C, G, K, D]; the boolean mask (True: attend)
    broadcasts to [C, H, Q, K].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        scores = query.float() @ key.float().transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).to(value.dtype) @ value


@cache
def _flash_attn() -> Any | None:
    """The function of flash-attn-4; None, with a printed reason, if it cannot be imported."""
    with suppress(OSError):  # if no file can be written, each process compiles again
        KERNELS.mkdir(parents=True, exist_ok=True)
        if os.access(KERNELS, os.W_OK):
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(KERNELS))
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001 — an incompatible version fails in many ways
        _say(f"torch's kernel; flash-attn-4 cannot be imported ({error_line(error)})")
        return None
    return flash_attn_varlen_func


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"attention: {line}", flush=True)


class _Heads(NamedTuple):
    """A kind of heads: `groups` queries per key, a width, perhaps a window or capped scores."""

    device: torch.device
    dtype: torch.dtype
    groups: int
    width: int
    windowed: bool
    softcap: float | None


@cache
def _flash_fits(heads: _Heads) -> bool:
    """Whether flash-attn-4 computes these heads as `_padded` does. The first call compiles the
    kernel, which takes seconds, or loads it, and prints one line."""
    cap = "" if heads.softcap is None else f", scores capped at {heads.softcap:g}"
    window = ", a window" if heads.windowed else ""
    kind = f"heads of {heads.width}, {heads.groups} to a key{window}{cap}"
    try:
        # A thread has its own autograd state: the caller may be under no_grad or autocast, or in a
        # layer whose activations are recomputed.
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
            warnings.simplefilter("ignore")  # about arguments that its compiler omits
            error = thread.submit(_flash_error, heads).result()
        # NaN counts as a problem.
        problem = None if error <= MAX_ERROR else f"its relative error is {error:.2g}"
    except Exception as error:  # noqa: BLE001 — the reason is printed
        problem = error_line(error)
    if problem is None:
        _say(f"flash-attn-4, for {kind}")
    else:
        _say(f"flash-attn-4 does not fit {kind} ({problem}); torch computes them")
    return problem is None


def _flash_error(heads: _Heads) -> float:
    """The largest relative error of flash-attn-4's output and gradients against `_padded` in fp32,
    on random segments of 150 and 60 tokens, the second one after 100 shared keys."""
    device, dtype, groups, width, windowed, softcap = heads
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(num, heads, width, generator=generator, device=device).to(dtype)
        for num, heads in ((210, 2 * groups), (310, 2), (310, 2), (210, 2 * groups))
    )
    bounds = torch.tensor([[0, 150, 210], [0, 150, 310]], dtype=torch.int32, device=device)
    span = Span(bounds[0], bounds[1], 150, 160, width**-0.5, 50 if windowed else None, softcap)
    _flash(query, key, value, span)  # without gradients it is compiled separately
    results = []
    for attend, kind in ((_flash, dtype), (_padded, torch.float32)):
        q, k, v = (x.to(kind).requires_grad_() for x in (query, key, value))
        out = attend(q, k, v, span)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad.to(kind))])
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(*results, strict=True))


def _flash(
    query_NHD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, span: Span
) -> torch.Tensor:
    attend = _flash_attn()
    assert attend is not None
    queries_S1, keys_S1, max_queries, max_keys = span.bounds
    with torch.cuda.device_of(query_NHD):  # the kernel launches on the current device
        out = attend(
            query_NHD,
            key_KGD,
            value_KGD,
            cu_seqlens_q=queries_S1,
            cu_seqlens_k=keys_S1,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            softmax_scale=span.scale,
            causal=True,
            window_size=(None if span.window is None else span.window - 1, 0),
            softcap=span.softcap or 0.0,
        )
    return out[0] if isinstance(out, tuple) else out


def _varlen(
    query_NHD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, span: Span
) -> torch.Tensor:
    attend, accepted = _torch_varlen()
    # torch 2.11 accepts grouped key/value heads; later versions need `enable_gqa`.
    grouped = {"enable_gqa": True} if "enable_gqa" in accepted else {}
    return attend(
        query_NHD,
        key_KGD,
        value_KGD,
        *span.bounds,
        scale=span.scale,
        window_size=(-1, 0) if span.window is None else (span.window - 1, 0),
        **grouped,
    )


@cache
def _torch_varlen() -> tuple[Any, frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _padded(
    query_NHD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, span: Span
) -> torch.Tensor:
    """SDPA on padded chunks of C segments of similar length, with sequences of similar length.
    Padding is at the end, where the causal mask hides it from every real token."""
    device = query_NHD.device
    num_tokens, heads, width = query_NHD.shape
    grouped = heads != key_KGD.shape[1]
    queries = _Segments(span.queries_S1)
    keys = queries if span.keys_S1 is span.queries_S1 else _Segments(span.keys_S1)
    out_NW = query_NHD.new_zeros(num_tokens, heads * width)
    for chunk in _chunks_by_length(queries.lengths_S.tolist(), keys.lengths_S.tolist()):
        chunk_C = torch.tensor(chunk, device=device)
        packed_P, padded_P, query_shape = queries.padding(chunk_C)
        query_CHQD = _pad(query_NHD, packed_P, padded_P, query_shape)
        from_keys = (packed_P, padded_P, query_shape) if keys is queries else keys.padding(chunk_C)
        key_CGLD, value_CGLD = (_pad(x, *from_keys) for x in (key_KGD, value_KGD))
        # The position of each query in its sequence minus the position of each key.
        prefix_C = (keys.lengths_S - queries.lengths_S)[chunk_C]
        mask_C1QL = None
        if span.window is not None or span.softcap is not None or prefix_C.any():
            positions_Q, positions_L = (
                torch.arange(x.shape[2], device=device) for x in (query_CHQD, key_CGLD)
            )
            behind_CQL = prefix_C[:, None, None] + positions_Q[:, None] - positions_L
            reach = span.window or len(positions_L)
            mask_C1QL = ((behind_CQL >= 0) & (behind_CQL < reach))[:, None]
        if span.softcap is not None:
            assert mask_C1QL is not None
            out_CHQD = _explicit(
                query_CHQD, key_CGLD, value_CGLD, mask_C1QL, span.scale, span.softcap
            )
        else:
            out_CHQD = scaled_dot_product_attention(
                query_CHQD,
                key_CGLD,
                value_CGLD,
                attn_mask=mask_C1QL,
                is_causal=mask_C1QL is None,
                scale=span.scale,
                enable_gqa=grouped,
            )
        out_PW = out_CHQD.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, padded_P)
        out_NW = out_NW.index_copy(0, packed_P, out_PW)
    return out_NW.view(num_tokens, -1, width)


class _Segments:
    """The segments of packed tokens between bounds (int32 [S + 1])."""

    def __init__(self, bounds_S1: torch.Tensor) -> None:
        self.starts_S, self.lengths_S = bounds_S1[:-1].long(), bounds_S1.diff().long()

    def padding(self, chunk_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
        """The indices of the chunk's P tokens among the packed tokens and in the padded chunk, and
        the padded shape [C, longest]."""
        lengths_C = self.lengths_S[chunk_C]
        positions = torch.arange(int(lengths_C.max()), device=chunk_C.device)
        real = positions < lengths_C[:, None]
        packed_P = (self.starts_S[chunk_C, None] + positions)[real]
        return packed_P, real.flatten().nonzero()[:, 0], real.shape


def _pad(
    x_NHD: torch.Tensor, packed_P: torch.Tensor, padded_P: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """The chunk's tokens [C, H, longest, D], zeros where it is padded."""
    padded = x_NHD.new_zeros(shape.numel(), x_NHD.shape[1] * x_NHD.shape[2])
    padded = padded.index_copy(0, padded_P, x_NHD.flatten(1).index_select(0, packed_P))
    return padded.view(*shape, -1, x_NHD.shape[2]).transpose(1, 2)


def _chunks_by_length(segments: list[int], sequences: list[int]) -> list[list[int]]:
    """Segment indices, longest first, with a new chunk wherever a segment or its sequence differs
    too much in length from the first of the chunk."""
    chunks: list[list[int]] = []
    for i in sorted(range(len(segments)), key=lambda i: (-segments[i], -sequences[i])):
        if chunks:
            first = chunks[-1][0]
            low, high = sorted((sequences[i], sequences[first]))
            if segments[i] >= MIN_FILL * segments[first] and low >= MIN_FILL * high:
                chunks[-1].append(i)
                continue
        chunks.append([i])
    return chunks
