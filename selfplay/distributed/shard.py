"""Shards a model's parameters over the mesh, reduces its gradients and gathers its values.

Each rank's loss is its sum over tokens divided by the GLOBAL number of tokens, so gradients are
summed over "dp", never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from selfplay.distributed.gather import box_at, gather_flat, local_part, sharded_as
from selfplay.distributed.tensor_parallel import divide, partial_parameters
from selfplay.distributed.world import World

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")

# A model of at most this many bytes in its compute dtype is one FSDP unit. The hooks around a small
# layer take more CPU time than its kernels take on a GPU, and there is little memory to save.
ONE_UNIT = 2**30


def shard(
    model: PreTrainedModel,
    world: World,
    *,
    compute_dtype: torch.dtype = torch.float32,
    recompute: int = 0,
    wrapped: bool = False,
) -> PreTrainedModel:
    """Shard the model over the mesh, in place: parameters become DTensors on `world.device`.

    Parameters keep their dtype (the master copy). Layers compute in `compute_dtype`, and gradients
    are summed over ranks in float32. The backward pass recomputes the activations of every
    `recompute`-th layer (0: of none). A model on the meta device takes no memory until
    `fill_shards`. A single CPU process shards nothing. Nor does a single GPU with a small model
    whose parameters have another dtype, unless it is `wrapped`: each pass casts them
    (`cast_weights`). Raises ValueError for a model that `divide` refuses.
    """
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, layer in enumerate(model.base_model.layers):
            layer.gradient_checkpointing = number % recompute == 0
    if world.mesh is None:
        return model if model.device.type == "meta" else model.to(world.device)
    if world.tp > 1:
        divide(model, world.mesh["tp"])
    num_bytes = sum(local_part(p).numel() for p in model.parameters()) * compute_dtype.itemsize
    small = num_bytes <= ONE_UNIT and not recompute
    if world.world_size == 1 and small and model.dtype != compute_dtype and not wrapped:
        vars(model)["pass_dtype"] = compute_dtype
    else:
        _wrap(model, world, compute_dtype=compute_dtype, one_unit=num_bytes <= ONE_UNIT)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            # Buffers, such as rotary frequencies, are not moved with the parameters.
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(world.device)
    return model


def _wrap(
    model: PreTrainedModel, world: World, *, compute_dtype: torch.dtype, one_unit: bool
) -> None:
    """Shard the model by FSDP over the mesh's data-parallel ranks: each layer, then the rest, or
    with `one_unit` all of it at once."""
    assert world.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = world.mesh["dp"]
    # A single rank gathers nothing. A copy in another dtype is kept for the backward pass, to avoid
    # casting twice. A copy in the same dtype would save little time and cost the weights' memory.
    keep = world.dp_size == 1 and model.dtype != compute_dtype
    for layer in () if one_unit else model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    # The root holds the embeddings, the last norm and the head. Both ends of a pass need them, so
    # they stay gathered between forward and backward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    _sum_gradients(model)


def shard_alone(module: nn.Module, world: World) -> None:
    """Shard one small module over the data-parallel ranks, in place.

    It computes in the dtype of its parameters.
    """
    if world.mesh is not None:
        fully_shard(module, mesh=world.mesh["dp"])
        _sum_gradients(module)


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients instead of averaging them, by a reduction that gloo supports too.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def as_forward(function: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """A function of a model, run as FSDP runs `forward`: FSDP gathers the parameters around the
    call and reduces their gradients. Without FSDP it is a plain call, with the weights in the dtype
    of the pass."""

    @wraps(function)
    def run(model: M, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(model, FSDPModule):
            dtype = vars(model).get("pass_dtype")
            with nullcontext() if dtype is None else cast_weights(model, dtype):
                return function(model, *args, **kwargs)
        name = f"fsdp_{function.__name__}"
        if not hasattr(model, name):
            setattr(model, name, MethodType(function, model))
            register_fsdp_forward_method(model, name)
        result: T = getattr(model, name)(*args, **kwargs)
        if not torch.is_grad_enabled():
            reshard(model)  # without a backward pass, gathered values would be stale after a step
        return result

    return run


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block the model has copies of its weights in `dtype`. A backward pass adds the
    copies' gradients to the weights' own, in the weights' dtype. FSDP gives the same numbers, but
    its hooks around a small model take longer than the model's kernels."""
    held = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items()]
    weights = list({p: None for *_, p in held if p is not None})
    copies = dict(zip(weights, _Cast.apply(dtype, *weights), strict=True))
    for parameters, name, weight in held:
        parameters[name] = None if weight is None else copies[weight]
    try:
        yield
    finally:
        for parameters, name, weight in held:
            parameters[name] = weight


class _Cast(torch.autograd.Function):
    """Copies of tensors in another dtype; a kernel casts many."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs without a gradient later get None, not zeros."""
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(copies, list(weights))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradients that there are, in their weights' dtypes."""
        had = [(number, grad) for number, grad in enumerate(grads) if grad is not None]
        cast = [torch.empty_like(grad, dtype=ctx.dtypes[number]) for number, grad in had]
        if cast:
            torch._foreach_copy_(cast, [grad for _, grad in had])
        results: list[torch.Tensor | None] = [None] * len(grads)
        for (number, _), grad in zip(had, cast, strict=True):
            results[number] = grad
        return None, *results


def reshard(model: nn.Module) -> None:
    """Free gathered parameters; the model's parameters are its shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def vocab_shard(weight_VD: torch.Tensor) -> tuple[torch.Tensor, VocabShard | None]:
    """The head's local rows [V local, D], with a VocabShard if the vocabulary is split."""
    if not isinstance(weight_VD, DTensor):
        return weight_VD, None
    local_VD, mesh = weight_VD.to_local(), weight_VD.device_mesh
    over_ranks = (partial(each, group=mesh.get_group()) for each in (_all_gather, _all_reduce))
    return local_VD, VocabShard(mesh.get_local_rank() * local_VD.shape[0], *over_ranks)


def _all_gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.stack(parts)


def _all_reduce(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(part, group=group)
    return part


def clip_grad_norm(model: nn.Module, max_norm: float, world: World) -> float:
    """Finish the reduction of the gradients, clip them to `max_norm`, return the norm before that.

    Call exactly once between the last backward pass and the optimizer's step. The norm covers the
    full gradient, over all shards of both mesh dimensions. `max_norm` 0 clips nothing. If the norm
    is not finite, nothing is scaled.
    """
    divided: list[torch.Tensor] = []
    repeated: list[torch.Tensor] = []
    partial: set[int] = set()
    if world.tp > 1 and isinstance(model, PreTrainedModel):
        partial = {id(p) for p in partial_parameters(model)}
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        grad = local_part(parameter.grad)
        if id(parameter) in partial:
            assert world.mesh is not None
            dist.all_reduce(grad, group=world.mesh["tp"].get_group())
        (divided if _divided_over_tp(parameter) else repeated).append(grad)
    # Every tp rank holds the same repeated gradients, so each is counted `tp` times.
    total = _sum_of_squares(divided, world) + _sum_of_squares(repeated, world) / world.tp
    if world.mesh is not None:
        dist.all_reduce(total)
    norm = float(total.sqrt())
    if 0 < max_norm < norm < float("inf"):
        torch._foreach_mul_(divided + repeated, max_norm / norm)
    return norm


def _sum_of_squares(tensors: list[torch.Tensor], world: World) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=world.device)
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return norms.double().square().sum()


def _divided_over_tp(parameter: torch.Tensor) -> bool:
    """Whether each tensor-parallel rank has a part. The bias of a rowwise layer is also on the tp
    mesh, but in full on every rank."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    if names is None or "tp" not in names:
        return False
    assert isinstance(parameter, DTensor)
    return not parameter.placements[names.index("tp")].is_replicate()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; all ranks must call.

    On a CPU one blocking collective gathers it. DTensor's own collectives run in gloo's threads,
    where torch 2.13 has ended processes with a double free.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != "cpu":
        return tensor.full_tensor()
    return gather_flat([tensor], dtype=tensor.dtype, device=tensor.device).view(tensor.shape)


def plus_product(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """base + scale * left @ right, computed in fp32, with the dtype and sharding of `base`.

    Sharded tensors must be split by rows. All ranks must call this, because it gathers `right`,
    which should be small.
    """
    # `base` and `left` are split by the same rows, so each rank only needs its own rows of both.
    right = full_tensor(right)
    with torch.autocast(base.device.type, enabled=False):
        product = local_part(left).float() @ right.float()
    local = (local_part(base).float() + scale * product).to(base.dtype)
    return sharded_as(local, base)


def fill_shards(
    model: PreTrainedModel,
    read: Callable[[str, tuple[slice, ...]], torch.Tensor],
    device: torch.device,
) -> None:
    """Allocate and fill a model that was sharded on the meta device; existing buffers are kept.

    `read(name, box)` returns a box of the full tensor of that name, on any device.
    """
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    if not isinstance(model, FSDPModule):
        model.tie_weights()  # FSDP does this itself
    for name, buffer in list(model.named_buffers()):
        if name in buffers:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = buffers[name].to(device)
        else:
            buffer.copy_(read(name, tuple(slice(0, size) for size in buffer.shape)))
    for name, parameter in model.named_parameters():
        box = tuple(slice(0, size) for size in parameter.shape)
        if isinstance(parameter, DTensor):
            coordinate = parameter.device_mesh.get_coordinate()
            assert coordinate is not None
            box = box_at(parameter, coordinate)
        local = local_part(parameter)
        if local.numel():
            with torch.no_grad():
                local.copy_(read(name, box))


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's part of a vocabulary that is split over tensor-parallel ranks.

    `start` is the id of its first row. `all_gather` stacks every rank's tensor on a new first
    dimension. `all_reduce` returns the sum over the ranks.
    """

    start: int
    all_gather: Callable[[torch.Tensor], torch.Tensor]
    all_reduce: Callable[[torch.Tensor], torch.Tensor]
