"""What an SGLang engine holds after a push, told from the trainer's weights: names, slices, hashes.

Independent of the comparison that a run makes, which uses the engine's own loader.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selfplay.engines.sglang.fast.engine import FastEngine
from selfplay.engines.weights import Weights


def engine_layout(
    named: Mapping[str, Tensor], config: Any, *, tp_size: int, tp_rank: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that rank `tp_rank` of the engine holds after a push of `named`, with SGLang's
    names.

    Covers dense Llama, Qwen2 and Qwen3. q, k and v form one tensor, gate and up another, both split
    by output rows. o and down are split by input columns. Embedding and head are split by
    vocabulary rows, after the vocabulary is padded with zeros to a multiple of 64. With more ranks
    than key heads, neighbouring ranks hold the same key head.
    """
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads

    def rows(tensor: Tensor, unit: int, num_units: int) -> Tensor:
        """This rank's share of `num_units` blocks of `unit` rows; too few blocks are repeated."""
        share = max(1, num_units // tp_size)
        first = tp_rank * num_units // tp_size
        return tensor[first * unit : (first + share) * unit]

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp_size, dim=1)[tp_rank]

    for name, tensor in named.items():
        stem, _, leaf = name.rpartition(".")
        parent, _, module = stem.rpartition(".")
        if module == "q_proj":
            key, value = named[f"{parent}.k_proj.{leaf}"], named[f"{parent}.v_proj.{leaf}"]
            parts = [rows(tensor, head_dim, num_heads)]
            parts += [rows(other, head_dim, num_kv_heads) for other in (key, value)]
            yield f"{parent}.qkv_proj.{leaf}", torch.cat(parts)
        elif module == "gate_proj":
            up = named[f"{parent}.up_proj.{leaf}"]
            yield (
                f"{parent}.gate_up_proj.{leaf}",
                torch.cat([t.chunk(tp_size)[tp_rank] for t in (tensor, up)]),
            )
        elif module in ("k_proj", "v_proj", "up_proj"):
            continue
        elif module in ("o_proj", "down_proj") and leaf == "weight":
            yield name, columns(tensor).contiguous()
        elif module in ("embed_tokens", "lm_head"):
            padding = -len(tensor) % 64
            padded = (
                torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
                if padding
                else tensor
            )
            yield name, padded.chunk(tp_size)[tp_rank].contiguous()
        else:
            yield name, tensor


def expected_hashes(model: nn.Module, *, tp_size: int = 1) -> list[dict[str, str]]:
    """What `held_hashes` must return after a bf16 push of this model, one dict a rank. It gathers
    the full model; every rank of a sharded one calls it."""
    from sglang.srt.managers.mm_utils import tensor_hash

    named = dict(Weights(model, torch.bfloat16).named())
    return [
        {
            name: f"{tensor_hash(tensor.contiguous()):016x}"
            for name, tensor in engine_layout(named, model.config, tp_size=tp_size, tp_rank=rank)
        }
        for rank in range(tp_size)
    ]


def held_hashes(engine: FastEngine) -> list[dict[str, str]]:
    """SGLang's hash of each parameter and buffer, one dict for each rank. CUDA only."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    request = CheckWeightsReqInput(action="checksum")
    hashes = []
    for success, message, ranks, _ in engine.on_all(
        lambda manager: manager.check_weights(request), what="a weight check"
    ):
        assert success and ranks is not None, message
        hashes += [rank["checksums"] for rank in ranks]
    return hashes
