"""Tensor parallelism from a model's own plan: splits heads, MLP columns and vocabulary over ranks.

transformers' `base_model_tp_plan` marks each linear layer "colwise" or "rowwise"; these become
torch's parallel styles. Between a colwise and a rowwise layer each rank computes its own heads or
columns; elsewhere all ranks of a "tp" row hold the same hidden states. Knows no tokens and no
losses.
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
from transformers import PretrainedConfig, PreTrainedModel

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# Norms over each head: every rank holds the full weight, and gradients are summed over the ranks.
PER_HEAD = "replicated_with_grad_allreduce"
LAYER = "layers.*."


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the backbone by the plan, and embeddings and head by vocabulary, in place.

    The vocabulary is divided even if the plan would gather logits: log-probs then need only three
    numbers from each rank and position instead of full rows, and a tied embedding is divided in the
    same way. Raises ValueError for an untested model family, for sizes that do not divide, and for
    a plan with unknown styles.
    """
    plan = _checked_plan(model, mesh.size())
    backbone = model.base_model
    linear = {name: STYLES[kind]() for name, kind in plan.items() if kind in STYLES}
    # Every rank already holds the same values (or none, on the meta device), so nothing is sent.
    parallelize_module(backbone, mesh, linear, src_data_rank=None)
    embedding: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate())
    }
    parallelize_module(backbone, mesh, embedding, src_data_rank=None)
    # A copy waits for the collective, as `arrived` does, but stays in the autograd graph.
    backbone.embed_tokens.register_forward_hook(lambda _module, _ids, rows: rows.clone())
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = backbone.embed_tokens.weight
    else:
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()}, src_data_rank=None)
    # The hidden states are marked as replicated once for each block, so that their gradient is
    # summed over ranks once, not separately for q, k and v, or gate and up.
    parents = {name.rpartition(".")[0] for name, kind in plan.items() if kind == "colwise"}
    for layer in backbone.layers:
        for parent in sorted(parents):
            block = layer.get_submodule(parent.removeprefix(LAYER))
            block.register_forward_pre_hook(_replicate_input(mesh), with_kwargs=True)


def partial_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters that each rank holds in full but whose gradient covers only that rank's heads."""
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
    reason = why_undivided(config, size)
    if reason is not None:
        raise ValueError(reason)
    plan: dict[str, str] = config.base_model_tp_plan or {}
    unknown = set(plan.values()) - set(STYLES) - {PER_HEAD}
    if not plan or unknown:
        reason = f"its plan has unknown styles {sorted(unknown)}" if plan else "it has no plan"
        raise ValueError(f"parallel.tp must be 1 for {config.model_type}, got {size}: {reason}")
    return plan


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached from the autograd graph, after its collective has ended.

    A collective returns a wrapper that has no memory until a torch operator uses it. A kernel that
    takes a raw address (as liger's Triton kernels do) would read invalid memory instead.
    """
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _replicate_input(mesh: DeviceMesh) -> Callable[..., Any]:
    """A pre-forward hook that marks the hidden states as replicated over the mesh.

    The sum of their gradient over ranks ends before the preceding norm's backward reads it.
    """

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


# Families that tests/model/test_families.py compares with one process.
DIVIDED = (
    "llama", "qwen2", "qwen3", "mistral", "granite", "cohere", "seed_oss", "smollm3", "arcee",
)  # fmt: skip


def why_undivided(config: PretrainedConfig, size: int) -> str | None:
    """Why this model cannot be split over `size` ranks by tensor parallelism; None if it can."""
    if size == 1:
        return None
    family = config.model_type
    if family not in DIVIDED:
        return (
            f"parallel.tp must be 1 for {family}, got {size}: tensor parallelism is tested only "
            f"for {', '.join(DIVIDED)}"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        units = getattr(config, key)
        if units % size:
            nearest = max(n for n in range(1, size) if units % n == 0)
            return (
                f"parallel.tp must divide the model's {key} ({units}), got {size}; "
                f"the nearest is {nearest}"
            )
    return None
