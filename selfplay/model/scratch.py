"""The transformers config of a model with random weights."""

from __future__ import annotations

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from selfplay.config import ScratchConfig

ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


ROPE_THETA = 10_000.0  # the base of the rotary position embedding


def scratch_config(
    scratch: ScratchConfig, *, vocab_size: int | None = None, **given: int | None
) -> PretrainedConfig:
    """The config for these settings. `vocab_size` replaces theirs; `given` may be bos_token_id,
    eos_token_id, pad_token_id, and tie_word_embeddings, which is true by default."""
    config_class, _ = ARCHITECTURES[scratch.arch]
    if scratch.arch == "qwen3":  # its default head width is 128
        given["head_dim"] = scratch.width // scratch.heads
    defaults = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return config_class(
        vocab_size=scratch.vocab_size if vocab_size is None else vocab_size,
        hidden_size=scratch.width,
        intermediate_size=scratch.mlp_width,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        num_key_value_heads=scratch.kv_heads,
        max_position_embeddings=scratch.max_positions,
        initializer_range=scratch.init_range,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        **{**defaults, "tie_word_embeddings": True, **given},
    )
