"""The model shapes of the benches: real configs with random weights, so nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bench.rows import SHAPES
from selfplay.distributed import World, fill_shards, shard
from selfplay.learner.learner import RECOMPUTED
from selfplay.model.policy import apply_liger, empty_model


def qwen2_config(name: str) -> Qwen2Config:
    """The Qwen2.5 config of this size. Token 2 ends a text, and there is no start token."""
    width, layers, heads, kv_heads, mlp_width, vocab, tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp_width,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=2,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
    )


def save_random(name: str, folder: Path, device: torch.device) -> None:
    """Write a model of this shape with transformers' own random weights, in bfloat16."""
    with device:
        AutoModelForCausalLM.from_config(qwen2_config(name), dtype=torch.bfloat16).save_pretrained(
            folder
        )


def random_model(
    name: str, world: World, *, master: torch.dtype, liger: bool, checkpointing: str
) -> PreTrainedModel:
    """A model of this shape on the mesh, with random weights. Norm weights are ones."""
    model = empty_model(qwen2_config(name), dtype=master)
    if liger:
        apply_liger(model)
    compute = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    shard(model, world, compute_dtype=compute, recompute=RECOMPUTED[checkpointing])

    def noise(parameter: str, box: tuple[slice, ...]) -> torch.Tensor:
        size = [part.stop - part.start for part in box]
        if "norm" in parameter:
            return torch.ones(size, device=world.device)
        return torch.randn(size, device=world.device) * 0.02

    fill_shards(model, noise, world.device)
    return model.train()
