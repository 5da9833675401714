"""Writes a model and its tokenizer as llama.cpp's converter writes them into a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    architecture: str | None = None,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """The file, whose matrices have the type `kind`. `architecture` is named in place of the
    model's. `keys` without the architecture before them
    and `tensors` are added or replaced; None leaves one out."""
    config = model.config
    family = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(file, architecture or family)
    told = _numbers(config) | _tokenizer(tokenizer) | dict(keys or {})
    for key, value in told.items():
        if value is None:
            continue
        name = key if key.split(".")[0] in ("tokenizer", "general", "split") else f"{family}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, weight in (_weights(model, family) | dict(tensors or {})).items():
        if weight is None:
            continue
        matrix = weight.ndim > 1
        quantized = GGMLQuantizationType[kind if matrix else "F32"]
        data = quants.quantize(np.ascontiguousarray(weight, dtype=np.float32), quantized)
        writer.add_tensor(name, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _numbers(config: Any) -> dict[str, Any]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    told = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.key_length": width,
        "attention.value_length": width,
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "llama":
        told["rope.dimension_count"] = width
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        told |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        told["rope.scaling.original_context_length"] = original
        told |= {f"rope.scaling.yarn_{k}": rope[k] for k in ("beta_fast", "beta_slow") if k in rope}
    if hasattr(config, "num_experts"):
        told |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if hasattr(config, "shared_expert_intermediate_size"):
        told["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return told


def _tokenizer(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"]: token for token in described["added_tokens"]}
    tokens = [tokenizer.convert_ids_to_tokens(number) for number in range(len(tokenizer))]
    told = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "tokenizer.chat_template": tokenizer.chat_template,
        "tokenizer.ggml.add_bos_token": False,
    }
    for key, number in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        told[f"tokenizer.ggml.{key}_token_id"] = number
    return told


def _weights(model: PreTrainedModel, family: str) -> dict[str, Any]:
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family)
    known = get_tensor_name_map(arch, model.config.num_hidden_layers)
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float()
        heads = model.config.num_attention_heads
        if "k_proj" in name:
            heads = model.config.num_key_value_heads
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            pairs = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        stem = name.rpartition(".mlp.experts.")[0]
        if name.endswith("gate_up_proj"):
            block = f"blk.{stem.split('.')[-1]}"
            gate, up = weight.chunk(2, dim=1)
            found |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
            continue
        told = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert told is not None, name
        if "shared_expert_gate" in name:
            weight = weight[0]
        found[told if told.endswith((".weight", ".bias")) else f"{told}.weight"] = weight
    rope = model.config.rope_parameters
    if rope["rope_type"] == "llama3":
        dim = len(model.model.rotary_emb.inv_freq)
        plain = rope["rope_theta"] ** (-torch.arange(dim) / dim)
        found["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    return {name: weight.numpy() for name, weight in found.items()}
