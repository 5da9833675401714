"""Causal attention over packed sequences, plugged into transformers under the name "packed".

A packed row is N tokens holding S sequences back to back, without padding; `cu_seqlens_S1` (int32,
the first 0, the last N) says where each begins. When a model built with
`attn_implementation="packed"` is called with `packed_kwargs`, each token sees the tokens of its own
sequence up to itself, by the first of these that can run:

1. flash-attn's `flash_attn_varlen_func` (CUDA, bf16 or fp16, where the package is installed),
2. torch's own `varlen_attn` (CUDA, bf16 or fp16),
3. scaled dot-product attention on length-sorted padded chunks (CPU, or fp32).

Called without them, as when generating with a key-value cache, it is transformers' sdpa attention:
an explicit 4-D mask reaches it unchanged and a 2-D padding mask is expanded as usual.
This module knows tensors only: no text, no losses, no meshes.

Shapes: N packed tokens, S sequences, C sequences of a chunk, L its longest, H query heads, G
key/value heads, D width of a head, W = H * D.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "packed"
HALF_DTYPES = (torch.bfloat16, torch.float16)
# A chunk of the padded fallback holds sequences of at least this share of its longest one, so at
# most half of its rows are padding.
MIN_FILL = 0.5


def register_packed_attention() -> None:
    """Make "packed" a valid `attn_implementation`. Idempotent."""
    AttentionInterface.register(NAME, _packed_attention)
    # Without a mask builder of the same name transformers drops 2-D padding masks silently.
    # `packed_kwargs` hands over a 4-D placeholder, which transformers passes on as it is, so in
    # packed mode no mask is ever built.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_backend(device: torch.device | str, dtype: torch.dtype) -> str:
    """Which kernel packed attention uses there: "flash-attn", "torch-varlen" or "sdpa"."""
    if torch.device(device).type != "cuda" or dtype not in HALF_DTYPES:
        return "sdpa"
    if _flash_attn_varlen() is not None:
        return "flash-attn"
    return "torch-varlen"


def packed_kwargs(cu_seqlens_S1: torch.Tensor, max_seqlen: int) -> dict[str, Any]:
    """What a model's forward is given beside ids and positions to attend within sequences."""
    return {
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=cu_seqlens_S1.device),
        "cu_seq_lens_q": cu_seqlens_S1,
        "cu_seq_lens_k": cu_seqlens_S1,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """By transformers' signature: query [1, H, N, D], key, value [1, G, N, D] → [1, N, H, D]."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    assert max_length_q is not None and query.shape[0] == 1 and dropout == 0.0
    window = sliding_window if sliding_window and sliding_window < max_length_q else None
    # [1, heads, N, D] → [N, heads, D]: the varlen kernels take any strides whose last one is 1.
    query_NHD, key_NGD, value_NGD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attend = {"flash-attn": _flash, "torch-varlen": _varlen, "sdpa": _padded}[
        attention_backend(query.device, query.dtype)
    ]
    out_NHD = attend(query_NHD, key_NGD, value_NGD, cu_seq_lens_q, max_length_q, scale, window)
    return out_NHD.unsqueeze(0), None


@cache
def _flash_attn_varlen() -> Any | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _flash(
    query_NHD: torch.Tensor,
    key_NGD: torch.Tensor,
    value_NGD: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    attend = _flash_attn_varlen()
    assert attend is not None
    return attend(
        query_NHD,
        key_NGD,
        value_NGD,
        cu_seqlens_S1,
        cu_seqlens_S1,
        max_seqlen,
        max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )


def _varlen(
    query_NHD: torch.Tensor,
    key_NGD: torch.Tensor,
    value_NGD: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    attend, accepted = _torch_varlen()
    # torch 2.11 takes grouped key/value heads as they are; later versions want to be told.
    grouped = {"enable_gqa": True} if "enable_gqa" in accepted else {}
    return attend(
        query_NHD,
        key_NGD,
        value_NGD,
        cu_seqlens_S1,
        cu_seqlens_S1,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        **grouped,
    )


@cache
def _torch_varlen() -> tuple[Any, frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _padded(
    query_NHD: torch.Tensor,
    key_NGD: torch.Tensor,
    value_NGD: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """SDPA on padded [C, H, L, D] chunks of C sequences of similar length. Padding sits at the end
    of a sequence, where the causal mask hides it from every real token."""
    device = query_NHD.device
    num_tokens, _, width = query_NHD.shape
    grouped = query_NHD.shape[1] != key_NGD.shape[1]
    starts_S, lengths_S = cu_seqlens_S1[:-1].long(), cu_seqlens_S1.diff().long()
    out_NW = query_NHD.new_zeros(num_tokens, query_NHD.shape[1] * width)
    for chunk in _chunks_of_like_length(lengths_S.tolist()):
        chunk_C = torch.tensor(chunk, device=device)
        ages_L = torch.arange(int(lengths_S[chunk_C[0]]), device=device)
        real_CL = ages_L < lengths_S[chunk_C, None]
        # P tokens of the chunk: their rows in the packed order and in the padded one.
        packed_P = (starts_S[chunk_C, None] + ages_L)[real_CL]
        padded_P = real_CL.flatten().nonzero()[:, 0]
        query_CHLD, key_CGLD, value_CGLD = (
            x_NHD.new_zeros(real_CL.numel(), x_NHD.shape[1] * width)
            .index_copy(0, padded_P, x_NHD.flatten(1).index_select(0, packed_P))
            .view(*real_CL.shape, -1, width)
            .transpose(1, 2)
            for x_NHD in (query_NHD, key_NGD, value_NGD)
        )
        mask_LL = None
        if window is not None:
            behind_LL = ages_L[:, None] - ages_L[None, :]
            mask_LL = (behind_LL >= 0) & (behind_LL < window)
        out_CHLD = scaled_dot_product_attention(
            query_CHLD,
            key_CGLD,
            value_CGLD,
            attn_mask=mask_LL,
            is_causal=mask_LL is None,
            scale=scale,
            enable_gqa=grouped,
        )
        out_PW = out_CHLD.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, padded_P)
        out_NW = out_NW.index_copy(0, packed_P, out_PW)
    return out_NW.view(num_tokens, -1, width)


def _chunks_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Places of sequences, longest first, cut where one fills too little of a row."""
    chunks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if chunks and lengths[i] >= MIN_FILL * lengths[chunks[-1][0]]:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks
