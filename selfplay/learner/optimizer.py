"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfplay.config import OptimConfig
from selfplay.learner.muon import Muon
from selfplay.learner.rounding import RoundedAdamW

BETAS = (0.9, 0.95)  # AdamW's


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    lr: float | None = None,
    seed: int = 0,
    kind: str = "adamw",
) -> torch.optim.Optimizer:
    """AdamW, or Muon, over the parameters that are not frozen, without weight decay.

    With `kind="muon"`, for a language model, the matrices other than embedding and output layer
    take Muon's steps and the rest AdamW's. `lr` replaces the settings' rate. `seed` seeds the
    stochastic rounding of bf16 weights.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices + vectors}]
    rate = config.lr if lr is None else lr
    if kind == "muon":
        assert isinstance(model, PreTrainedModel)
        inside = matrices_inside(model)
        orthogonal = {id(p) for p in inside}
        groups[0]["params"] = [p for p in matrices + vectors if id(p) not in orthogonal]
        groups.append({"params": inside, "orthogonal": True})
        return Muon(groups, lr=rate, betas=BETAS, seed=seed)
    if config.master_dtype == "bfloat16":
        return RoundedAdamW(groups, lr=rate, betas=BETAS, seed=seed)
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=0.0, fused=True)


def matrices_inside(model: PreTrainedModel) -> list[nn.Parameter]:
    """The trained matrices of a language model other than its embedding and output layer."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad)
    return [p for p in trained if p.ndim == 2 and id(p) not in ends]


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int, schedule: str, final_share: float
) -> float:
    """The rate of a step from 0 to num_steps - 1: linear warm-up to `peak`, then constant, or a
    linear or cosine decay to `final_share` of the peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[schedule]
    return peak * (left if schedule == "constant" else final_share + (1.0 - final_share) * left)


def self_play_rate(step: int, optim: OptimConfig, *, num_steps: int) -> float:
    """The learning rate of a self-play step."""
    return learning_rate(
        step,
        peak=optim.lr,
        num_steps=num_steps,
        warmup_steps=optim.warmup_steps,
        schedule=optim.schedule,
        final_share=optim.final_share,
    )
