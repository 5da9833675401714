"""The tiny model of `tests/sglang` with one head of 32 dimensions: vLLM's attention on a CPU has no
smaller ones."""

from __future__ import annotations

import pathlib
from typing import Any

from transformers import PreTrainedModel

from selfplay.extras.vllm import VLLMEngine
from selfplay.extras.vllm_options import VLLMOptions
from tests.sglang import tiny

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# The same for a run of `helpers/tiny_run.py`.
RUN_HEADS = ("model.scratch.heads=1", "model.scratch.kv_heads=1")
SETTINGS: dict[str, Any] = {"kind": "vllm", "max_batch": 16, "timeout_s": 60.0}


def start(folder: str, **settings: Any) -> VLLMEngine:
    """An engine on the CPU, in fp32; `settings` are those of `engine`."""
    config = VLLMOptions(**(SETTINGS | settings))
    return VLLMEngine(folder, config, device="cpu", dtype="float32", context_length=tiny.POSITIONS)


def build() -> PreTrainedModel:
    return tiny.build(**HEADS)


def save(folder: pathlib.Path) -> str:
    return tiny.save(folder, **HEADS)
