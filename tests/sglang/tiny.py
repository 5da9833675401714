"""A tiny model for the real engine on CPU, and the model's own log-probs of the same tokens."""

from __future__ import annotations

import copy
import os
import pathlib
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.fast.engine import FastEngine
from selfplay.engines.sglang.plain import PlainEngine

STOP = 3
POSITIONS = 512
# An odd vocabulary, so that FSDP's two shards differ in size and the engine has to pad.
SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": STOP,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
PLAIN = "SELFPLAY_TEST_PLAIN"  # set by `--plain`, for the processes that tests start too
ENGINE: dict[str, Any] = {
    "max_cache_tokens": 8192,
    "max_batch": 16,
    "timeout_s": 60.0,
    "fast": PLAIN not in os.environ,
}


def start(
    folder: str,
    *,
    dtype: str = "float32",
    group: Any = None,
    **settings: Any,
) -> SGLangEngine:
    """An engine on the CPU with the weights of this folder; `settings` are those of `engine`."""
    config = ChosenEngine(**(ENGINE | settings))
    # Eight more than the positions, as in a run whose games may use them all.
    context = POSITIONS + 8
    return kind(config.fast)(
        folder, config, device="cpu", dtype=dtype, context_length=context, group=group
    )


def scheduler(engine: SGLangEngine) -> int:
    """The pid of the engine's scheduler, found by its process title or, of a fork, its name."""
    return next(
        p.pid
        for p in engine._loop.children
        if p.pid is not None
        and "scheduler" in p.name + pathlib.Path(f"/proc/{p.pid}/cmdline").read_text()
    )


def kind(fast: bool = ENGINE["fast"]) -> type[SGLangEngine]:
    """The class of engine with `engine.fast`, or without."""
    return FastEngine if fast else PlainEngine


def build(**shape: Any) -> PreTrainedModel:
    """A two-layer Qwen2 in fp32, the same random weights each time; `shape` replaces sizes."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**(SHAPE | shape))).eval()


def save(folder: pathlib.Path, **shape: Any) -> str:
    """Write that model where an engine can load it."""
    build(**shape).save_pretrained(folder)
    return str(folder)


def moved(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """A copy in which every parameter has changed, as after a few updates."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@torch.no_grad()
def score(
    model: PreTrainedModel, prompt: list[int], ids: list[int], temperature: float
) -> list[float]:
    """The model's own log-probs of `ids` after `prompt`: full softmax after the temperature."""
    tokens = torch.tensor([[*prompt, *ids]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()


def worst_mismatch(
    model: PreTrainedModel, prompt: list[int], completion: Any, temperature: float = 1.0
) -> float:
    """The largest difference between the engine's log-probs and the model's, in nats."""
    own = score(model, prompt, completion.ids, temperature)
    return max(abs(a - b) for a, b in zip(own, completion.logprobs, strict=True))
