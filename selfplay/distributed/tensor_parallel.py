"""Tensor parallelism from a model's own plan: splits heads, MLP columns and vocabulary over ranks.

transformers' `base_model_tp_plan` marks each linear layer "colwise" or "rowwise". Between a colwise
and a rowwise layer each rank computes its own heads or columns; elsewhere all ranks of a "tp" group
hold the same hidden states. The parameters are DTensors, but the layers compute with their local
parts: with torch's parallel styles a pass takes 2.4 times as long to launch (docs/notes/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from selfplay.distributed.gather import local_part

STYLES = ("colwise", "rowwise")
# Norms over each head: every rank holds the full weight, and gradients are summed over the ranks.
PER_HEAD = "replicated_with_grad_allreduce"
LAYER = "layers.*."


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the backbone by the plan, and embeddings and head by vocabulary, in place.

    The vocabulary is split even if the plan would gather logits: log-probs then need only three
    numbers per rank and position instead of full rows, and a tied embedding is split in the same
    way. Raises ValueError for an untested model family and for sizes that do not divide evenly.
    """
    reason = why_undivided(model.config, mesh.size())
    if reason is not None:
        raise ValueError(reason)
    # Every rank already holds the same values (or none, on the meta device), so nothing is sent:
    # src_data_rank is None.
    plan: dict[str, str] = model.config.base_model_tp_plan
    backbone = model.base_model
    group = mesh.get_group()
    forwards = {"colwise": _colwise, "rowwise": _rowwise(group)}
    # The gradient of the hidden states is summed over ranks once per block, not separately for q, k
    # and v, or gate and up.
    blocks = sorted({name.rpartition(".")[0] for name, kind in plan.items() if kind == "colwise"})
    for layer in backbone.layers:
        for name, kind in plan.items():
            if kind in STYLES:
                linear = layer.get_submodule(name.removeprefix(LAYER))
                _distribute(linear, mesh, rows=kind == "colwise")
                linear.forward = MethodType(forwards[kind], linear)
        for name in blocks:
            block = layer.get_submodule(name.removeprefix(LAYER))
            block.register_forward_pre_hook(_sum_gradient_of_input(group), with_kwargs=True)
    embedding: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate())
    }
    parallelize_module(backbone, mesh, embedding, src_data_rank=None)
    # The collective returns a wrapper that has no memory until a torch operator uses it. A kernel
    # that takes a raw address (as liger's Triton kernels do) would read invalid memory.
    backbone.embed_tokens.register_forward_hook(lambda _module, _ids, rows: rows.clone())
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = backbone.embed_tokens.weight
    else:
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()}, src_data_rank=None)


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


def _distribute(linear: nn.Module, mesh: DeviceMesh, *, rows: bool) -> None:
    """Make the parameters DTensors over the mesh, each rank's part from its own values: weight and
    bias split by rows, or the weight by columns, with the full bias on each rank."""
    for name, parameter in list(linear.named_parameters(recurse=False)):
        placement = Shard(0) if rows else Shard(1) if name == "weight" else Replicate()
        part = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(part, parameter.requires_grad))


def _colwise(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """This rank's columns of the layer's output."""
    bias = None if linear.bias is None else local_part(linear.bias)
    return F.linear(hidden, local_part(linear.weight), bias)


def _rowwise(group: dist.ProcessGroup) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
    """The forward pass of a layer whose input is this rank's columns; all ranks return the sum."""

    def forward(linear: nn.Linear, part: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _Sum.apply(F.linear(part, local_part(linear.weight)), group)
        return total if linear.bias is None else total + local_part(linear.bias)

    return forward


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, in place; each rank's gradient is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(part)
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumGradient(torch.autograd.Function):
    """The unchanged tensor; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_gradient_of_input(group: dist.ProcessGroup) -> Callable[..., Any]:
    """A pre-forward hook that sums the gradient of a block's hidden states over the ranks."""

    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_SumGradient.apply(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _SumGradient.apply(kwargs["hidden_states"], group)}

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
