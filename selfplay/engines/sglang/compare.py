"""Compares weights bit for bit inside an SGLang engine's own process, without writing any.

SGLang calls `compare` as a custom weight loader. `compare` runs the model's own `load_weights`, as
a push does, so this file needs no description of fused, padded and sharded layouts. Each write to a
parameter becomes a comparison. The counts go back through the buffer that the trainer shares with
the engine, because SGLang ends the scheduler when a custom loader raises. Sizes in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LOADER = "selfplay.engines.sglang.compare.compare"
FOUND_BYTES = 16  # one rank's result: elements compared and elements that differ, int64 each
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)


def describe(names: Sequence[str], shapes: Sequence[torch.Size], *, rank: int, ranks: int) -> str:
    """The buffer's name: JSON with the values it holds and the result slot of rank `rank`."""
    values = [[name, list(shape)] for name, shape in zip(names, shapes, strict=True)]
    return json.dumps({"rank": rank, "ranks": ranks, "values": values})


def compare(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Compare one buffer's values with the model's; write the counts to this rank's slot.

    The buffer holds one slot of FOUND_BYTES for each rank, then the values as a push lays them out.
    """
    [(name, buffer_B)] = named_tensors
    description = json.loads(name)
    slot_bytes = FOUND_BYTES * description["ranks"]
    slots_B, values_B = buffer_B.split([slot_bytes, len(buffer_B) - slot_bytes])
    num_elements = sum(math.prod(shape) for _, shape in description["values"])
    dtype = {2: torch.bfloat16, 4: torch.float32}[len(values_B) // num_elements]
    flat_N, start, named = values_B.view(dtype), 0, []
    for weight, shape in description["values"]:
        size = math.prod(shape)
        named.append((weight, flat_N[start : start + size].view(shape)))
        start += size
    with torch.no_grad(), _CompareWrites(model) as comparison:
        model.load_weights(named)  # type: ignore[operator]
    num_different = int(sum(comparison.differing))
    counts = torch.tensor([comparison.num_compared, num_different], dtype=torch.int64)
    slots_B.view(torch.int64).view(-1, 2)[description["rank"]] = counts.to(buffer_B.device)
    if buffer_B.is_cuda:
        torch.cuda.synchronize()


class _CompareWrites(TorchDispatchMode):
    """Replaces each write to a parameter of the model by a comparison with that parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.num_compared = 0
        self.differing: list[Tensor | int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not _COPY and func not in _FILLS:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if target.untyped_storage().data_ptr() not in self._parameters:
            return func(*args, **(kwargs or {}))
        if isinstance(source, Tensor):
            source = source.to(target.device, target.dtype)
        self.num_compared += target.numel()
        self.differing.append((target != source).sum())
        return target
