"""Compares weights inside an SGLang engine's own process, bit for bit, without writing any.

SGLang calls `compare` as a custom weight loader. The model's own `load_weights` then runs as in a
push, so fused, padded and sharded layouts need no second description here; but each write to a
parameter is turned into a comparison. What was found goes back in the buffer that the trainer
shares with the engine: SGLang ends the scheduler when a custom loader raises. Sizes in bytes.
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
FOUND_BYTES = 16  # what one rank found: elements compared, elements that differ, int64 each
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)


def describe(names: Sequence[str], shapes: Sequence[torch.Size], *, rank: int, ranks: int) -> str:
    """The name under which a buffer travels: what is in it, and which of its slots is whose."""
    values = [[name, list(shape)] for name, shape in zip(names, shapes, strict=True)]
    return json.dumps({"rank": rank, "ranks": ranks, "values": values})


def compare(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Compare one buffer's values with the model's and write down what was found.

    The buffer holds a slot of FOUND_BYTES for each rank, then the values as they are pushed.
    """
    [(name, buffer_B)] = named_tensors
    described = json.loads(name)
    slots_B, values_B = buffer_B.split(
        [FOUND_BYTES * described["ranks"], len(buffer_B) - FOUND_BYTES * described["ranks"]]
    )
    num_elements = sum(math.prod(shape) for _, shape in described["values"])
    dtype = {2: torch.bfloat16, 4: torch.float32}[len(values_B) // num_elements]
    flat_N, start, named = values_B.view(dtype), 0, []
    for weight, shape in described["values"]:
        size = math.prod(shape)
        named.append((weight, flat_N[start : start + size].view(shape)))
        start += size
    with torch.no_grad(), _Comparing(model) as found:
        model.load_weights(named)  # type: ignore[operator]
    counts = torch.tensor([found.num_compared, int(sum(found.differing))], dtype=torch.int64)
    slots_B.view(torch.int64).view(-1, 2)[described["rank"]] = counts.to(buffer_B.device)
    if buffer_B.is_cuda:
        torch.cuda.synchronize()


class _Comparing(TorchDispatchMode):
    """Inside, what would be written to a parameter of the model is compared with it."""

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
