"""Causal attention over packed sequences, plugged into transformers under the name "packed".

A packed row is N tokens holding S sequences back to back, without padding; `cu_seqlens_S1` (int32,
the first 0, the last N) says where each begins. When a model built with
`attn_implementation="packed"` is called with `packed_kwargs`, each token attends to the tokens of
its own sequence up to itself. The first of these that can run computes it:

1. flash-attn's `flash_attn_varlen_func` (CUDA, bf16 or fp16, where the package is installed),
2. torch's own `varlen_attn` (CUDA, bf16 or fp16),
3. scaled dot-product attention on length-sorted padded chunks (CPU, or fp32).

A model that caps its attention scores (Gemma-2) uses flash-attn if it can run, otherwise an
explicit softmax, which materializes all scores [C, H, L, L]. Values narrower than the keys
(DeepSeek) are padded.

Without `packed_kwargs`, as in generation with a key-value cache, it is transformers' sdpa
attention: an explicit 4-D mask is restricted to the layer's sliding window, and a 2-D padding mask
is expanded as usual. Keys must then be in the order of their positions, without gaps.
This module knows tensors only: no text, no losses, no meshes.

Shapes: N packed tokens, S sequences, C sequences of a chunk, L its longest, H query heads, G
key/value heads, D width of a head, W = H * D.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "packed"
HALF_DTYPES = (torch.bfloat16, torch.float16)
# A sequence in a chunk of the padded fallback is at least this share of the longest one, so at most
# half of a chunk is padding.
MIN_FILL = 0.5


def register_packed_attention() -> None:
    """Make "packed" a valid `attn_implementation`. Idempotent."""
    AttentionInterface.register(NAME, _packed_attention)
    # Without a mask builder of the same name transformers silently drops 2-D padding masks.
    # `packed_kwargs` passes a 4-D placeholder, which transformers leaves as it is, so packed mode
    # never builds a mask.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_backend(device: torch.device | str, dtype: torch.dtype) -> str:
    """The kernel of packed attention: "flash-attn", "torch-varlen" or "sdpa"."""
    if torch.device(device).type != "cuda" or dtype not in HALF_DTYPES:
        return "sdpa"
    if _flash_attn_varlen() is not None:
        return "flash-attn"
    return "torch-varlen"


def packed_kwargs(cu_seqlens_S1: torch.Tensor, max_seqlen: int) -> dict[str, Any]:
    """The arguments of a model's forward, besides ids and positions, for packed attention."""
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Has transformers' signature: query [1, H, N, D], key, value [1, G, N, D] → [1, N, H, D].

    Raises ValueError for attention sinks (`s_aux`) and for dropout, which no kernel here supports.
    """
    if s_aux is not None:
        raise ValueError("packed attention does not support attention sinks (s_aux)")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if cu_seq_lens_q is None:
        mask = _within_window(query, key, attention_mask, sliding_window)
        if softcap is not None:
            if mask is None:
                mask = _distance(query.shape[2], key.shape[2], query.device) >= 0
            out = _explicit(query, key, value, mask, scale, softcap)
            return out.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise ValueError(f"attention dropout must be 0 in packed rows, got {dropout}")
    assert max_length_q is not None and query.shape[0] == 1
    window = sliding_window if sliding_window and sliding_window < max_length_q else None
    width = value.shape[-1]
    value = pad(value, (0, key.shape[-1] - width))
    # [1, heads, N, D] → [N, heads, D]: the varlen kernels only need a last stride of 1.
    query_NHD, key_NGD, value_NGD = (x[0].transpose(0, 1) for x in (query, key, value))
    backend = attention_backend(query.device, query.dtype)
    attend = {"flash-attn": _flash, "torch-varlen": _varlen, "sdpa": _padded}[backend]
    if softcap is not None:
        attend = partial(_flash if backend == "flash-attn" else _padded, softcap=softcap)
    out_NHD = attend(query_NHD, key_NGD, value_NGD, cu_seq_lens_q, max_length_q, scale, window)
    return out_NHD[..., :width].unsqueeze(0), None


def _distance(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """How many positions each key is before each of the last queries [Q, K]."""
    positions_K = torch.arange(num_keys, device=device)
    return positions_K[num_keys - num_queries :, None] - positions_K[None, :]


def _within_window(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, window: int | None
) -> torch.Tensor | None:
    """The mask without the keys that are outside of this layer's window.

    transformers passes an explicit mask to all layers, whatever their windows.
    """
    if not window or key.shape[2] <= window:
        return mask
    distance_QK = _distance(query.shape[2], key.shape[2], query.device)
    near_QK = distance_QK < window
    if mask is None:
        return (near_QK & (distance_QK >= 0))[None, None]
    if mask.dtype == torch.bool:
        return mask & near_QK
    return mask.masked_fill(~near_QK, torch.finfo(mask.dtype).min)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention with softmax(softcap * tanh(scores / softcap)) in fp32 → [C, H, Q, D].

    query [C, H, Q, D], key and value [C, G, K, D]; the mask broadcasts to [C, H, Q, K] and is
    boolean (True: attend) or added to the scores.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return scores.softmax(-1).to(value.dtype) @ value


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
    softcap: float = 0.0,
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
        softcap=softcap,
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
    # torch 2.11 accepts grouped key/value heads; later versions need `enable_gqa`.
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
    softcap: float | None = None,
) -> torch.Tensor:
    """SDPA on padded chunks [C, H, L, D] of C sequences of similar length. Padding is at the end of
    a sequence, where the causal mask hides it from every real token."""
    device = query_NHD.device
    num_tokens, _, width = query_NHD.shape
    grouped = query_NHD.shape[1] != key_NGD.shape[1]
    starts_S, lengths_S = cu_seqlens_S1[:-1].long(), cu_seqlens_S1.diff().long()
    out_NW = query_NHD.new_zeros(num_tokens, query_NHD.shape[1] * width)
    for chunk in _chunks_of_like_length(lengths_S.tolist()):
        chunk_C = torch.tensor(chunk, device=device)
        positions_L = torch.arange(int(lengths_S[chunk_C[0]]), device=device)
        real_CL = positions_L < lengths_S[chunk_C, None]
        # The chunk's P tokens: their indices in the packed row and in the padded chunk.
        packed_P = (starts_S[chunk_C, None] + positions_L)[real_CL]
        padded_P = real_CL.flatten().nonzero()[:, 0]
        query_CHLD, key_CGLD, value_CGLD = (
            x_NHD.new_zeros(real_CL.numel(), x_NHD.shape[1] * width)
            .index_copy(0, padded_P, x_NHD.flatten(1).index_select(0, packed_P))
            .view(*real_CL.shape, -1, width)
            .transpose(1, 2)
            for x_NHD in (query_NHD, key_NGD, value_NGD)
        )
        mask_LL = None
        if window is not None or softcap is not None:
            distance_LL = _distance(len(positions_L), len(positions_L), device)
            mask_LL = (distance_LL >= 0) & (distance_LL < (window or len(positions_L)))
        if softcap is not None:
            assert mask_LL is not None
            out_CHLD = _explicit(query_CHLD, key_CGLD, value_CGLD, mask_LL, scale, softcap)
        else:
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
    """Indices of sequences, longest first, with a new chunk where one is too short for the last."""
    chunks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if chunks and lengths[i] >= MIN_FILL * lengths[chunks[-1][0]]:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks
