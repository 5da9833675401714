"""The smallest model and the smallest run: two layers, a handful of games, seconds in all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfplay.batch import pack
from selfplay.config import ScratchConfig
from selfplay.model import policy_logprobs, scratch_model
from selfplay.samples import Sample

CPU = torch.device("cpu")
VOCAB = 300
TINY = """
steps: 4
save_every: 2
log_games_every: 7
threads: 1
device: cpu
game: {size: 2, p_observed: 0.5, scale: false, max_value: 10, keep: exactly_one, brief: true}
model:
  scratch: {width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 64, max_positions: 192,
            vocab_size: 400, tokenizer_games: 60}
warm_start: {num_games: 400, teachers: ["solo", "honest:tell=top"], batch_size: 8, epochs: 2,
             warmup_steps: 10, lr: 6.0e-3}
rollout: {instances: 4, group_size: 4, max_turns: 4, max_retries: 1, max_new_tokens: 24,
          max_game_tokens: 160}
optim: {lr: 1.0e-3, schedule: linear, tokens_per_microbatch: 1024}
eval: {every: 0, num_games: 8, final_games: 8}
"""


def tiny_model(arch: str = "qwen2", *, seed: int = 0, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Random weights, grouped key/value heads, as sure of itself as a trained model."""
    shape = ScratchConfig(
        arch=arch,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp_width=48,
        max_positions=256,
        init_range=0.3,
    )
    return scratch_model(shape, vocab_size=vocab_size, seed=seed)


def trainer_logprobs(
    model: PreTrainedModel, samples: list[Sample], *, temperature: float
) -> torch.Tensor:
    """The trainer's log-probs of all trained tokens of one packed row, in order."""
    batch = pack(samples, device=CPU)
    with torch.no_grad():
        logprobs_M, _ = policy_logprobs(
            model,
            batch.ids_N,
            batch.positions_N,
            batch.cu_seqlens_S1,
            batch.max_seqlen,
            batch.predict_M,
            batch.targets_M,
            temperature=temperature,
        )
    return logprobs_M


def write_tiny(folder: Path) -> Path:
    """The run's settings as a file beside the run folder."""
    path = folder.parent / "tiny.yaml"
    path.write_text(TINY)
    return path


def run_tiny(folder: Path, *overrides: str) -> int:
    """Train in `folder`; returns the exit status of the command."""
    import train

    return train.main(["--config", str(write_tiny(folder)), f"out={folder}", *overrides])


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock decides (tokens_per_s ends in _s too)."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.endswith("_s")}
        for line in lines
    ]
