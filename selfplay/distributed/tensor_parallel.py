"""Tensor parallel from a model's own plan: which rank computes which heads, MLP columns and words.

transformers' `base_model_tp_plan` names for each linear layer "colwise" or "rowwise"; these become
torch's parallel styles. Between the two every rank computes its own heads; outside them all ranks
of a row hold the same hidden states. Knows no tokens and no losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# A norm over each head: its weight is the same on every rank, its gradient a sum over their heads.
PER_HEAD = "replicated_with_grad_allreduce"
LAYER = "layers.*."


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the trunk by the plan, and embeddings and head by vocabulary, in place.

    The vocabulary is divided even where the plan would gather logits: log-probs then combine three
    numbers a position and rank instead of whole rows, and a tied embedding shares the division.
    Raises ValueError for a family that is not tested so, where the sizes do not divide, and where
    the plan asks for more than is known here.
    """
    plan = _checked_plan(model, mesh.size())
    backbone = model.base_model
    linear = {name: STYLES[kind]() for name, kind in plan.items() if kind in STYLES}
    # Every rank holds the same values (or none, on the meta device), so none has to be sent.
    parallelize_module(backbone, mesh, linear, src_data_rank=None)
    words: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(backbone, mesh, words, src_data_rank=None)
    # A copy waits for the collective, as `arrived` does, and can be differentiated.
    backbone.embed_tokens.register_forward_hook(lambda _module, _ids, rows: rows.clone())
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = backbone.embed_tokens.weight
    else:
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()}, src_data_rank=None)
    # Marked once as the same on every rank, a hidden state has its gradient summed over ranks once
    # and not once each for q, k and v, or gate and up.
    parents = {name.rpartition(".")[0] for name, kind in plan.items() if kind == "colwise"}
    for layer in backbone.layers:
        for parent in sorted(parents):
            block = layer.get_submodule(parent.removeprefix(LAYER))
            block.register_forward_pre_hook(_replicate_input(mesh), with_kwargs=True)


def partial_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters that are whole on every rank while each rank's gradient covers its heads only."""
    plan = model.config.base_model_tp_plan or {}
    names = [name.removeprefix(LAYER) for name, kind in plan.items() if kind == PER_HEAD]
    return [
        parameter
        for layer in model.base_model.layers
        for name in names
        for parameter in layer.get_submodule(name).parameters()
    ]


def _checked_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    config = model.config
    refused = why_not_divided(model)
    if refused is not None:
        raise ValueError(f"{config.model_type}: {refused}")
    plan: dict[str, str] = config.base_model_tp_plan or {}
    unknown = set(plan.values()) - set(STYLES) - {PER_HEAD}
    if not plan or unknown:
        why = f"its plan asks for {sorted(unknown)}" if plan else "it brings no plan"
        raise ValueError(f"parallel.tp must be 1 for {config.model_type}, got {size}: {why}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        units = getattr(config, key)
        if units % size:
            nearest = max(n for n in range(1, size) if units % n == 0)
            raise ValueError(
                f"parallel.tp must divide the model's {key} ({units}), got {size}; "
                f"the nearest is {nearest}"
            )
    return plan


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself once its collective has ended, without its graph.

    What a collective returns is a wrapper without memory of its own until an operator of torch asks
    for it. A kernel that takes a bare address (liger's are Triton's) never asks and would read from
    nowhere: "illegal memory access".
    """
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _replicate_input(mesh: DeviceMesh) -> Callable[..., Any]:
    """A pre-forward hook that marks the hidden states as the same on every rank of the mesh; their
    gradient, a sum over the ranks, has arrived when the norm before it is differentiated."""

    def replicated(hidden: torch.Tensor) -> DTensor:
        if hidden.requires_grad:
            hidden.register_hook(arrived)
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)

    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (replicated(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": replicated(kwargs["hidden_states"])}

    return hook


# Families whose division is compared with one process in tests/test_families.py.
DIVIDED = (
    "llama", "qwen2", "qwen3", "mistral", "granite", "cohere", "seed_oss", "smollm3", "arcee",
)  # fmt: skip


def why_not_divided(model: PreTrainedModel) -> str | None:
    """Why tensor parallel cannot be used for this model; None where it may."""
    if model.config.model_type in DIVIDED:
        return None
    return f"parallel.tp must be 1 for it, tensor parallel is tested for {', '.join(DIVIDED)}"
