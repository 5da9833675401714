"""The messages of a push to an SGLang engine: buckets of weights, which it loads or compares.

A bucket is one flat tensor of full parameters. Its message is a pair, the input of SGLang's custom
weight loaders: a JSON description of the bucket, and a handle to its memory (a CUDA IPC handle, or
shared memory on a CPU). SGLang calls `read` with it in the engine's own process.

To load, `read` runs the model's own `load_weights`. To compare bit for bit it does the same, with
each write to a parameter replaced by a comparison, so this file needs no description of fused,
padded and sharded layouts. The counts go into a folder that the trainer reads, because SGLang ends
the scheduler if a custom loader raises.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LOADER = "selfplay.engines.sglang.buckets.read"
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)


def message(
    flat_N: Tensor, shapes: Mapping[str, torch.Size], *, folder: str = ""
) -> list[tuple[str, Any]]:
    """The input of `read` for a bucket: weights to load or, with `folder`, to compare, where the
    counts are written.

    `flat_N` owns its storage. It must hold its final values (on CUDA synchronize first), must not
    be written again, and must live until the engine has answered.

    On a CPU it is moved to shared memory, which `read` opens by its path while this tensor lives.
    SGLang unpickles plain tensors alone, and torch's own way to share one needs a parent-child
    relation, or another process that must answer within a second, which it does not do on a busy
    machine.
    """
    memory = None
    if not flat_N.is_cuda:
        storage = flat_N.untyped_storage()
        assert storage.nbytes() == flat_N.numel() * flat_N.element_size()
        descriptor, _ = storage._share_fd_cpu_()
        dtype = str(flat_N.dtype).removeprefix("torch.")
        memory = {"file": f"/proc/{os.getpid()}/fd/{descriptor}", "dtype": dtype}
    described = json.dumps({"folder": folder, "shapes": shapes, "memory": memory})
    return [(described, flat_N if memory is None else torch.empty(0))]


def read(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """In SGLang's process: load a message's bucket into the model, or compare the two and append a
    line of counts to this process's file in the message's folder."""
    [(described, flat_N)] = named_tensors
    bucket = json.loads(described)
    sizes = [math.prod(shape) for shape in bucket["shapes"].values()]
    if (memory := bucket["memory"]) is not None:
        dtype = getattr(torch, memory["dtype"])
        flat_N = torch.from_file(memory["file"], shared=True, size=sum(sizes), dtype=dtype)
    parts = flat_N.split(sizes)
    shaped = zip(bucket["shapes"].items(), parts, strict=True)
    named = [(name, part.view(shape)) for (name, shape), part in shaped]
    if bucket["folder"]:
        with (Path(bucket["folder"]) / str(os.getpid())).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(compare(model, named))}\n")
    else:
        model.load_weights(named)  # type: ignore[operator]
    if flat_N.is_cuda:
        torch.cuda.synchronize()  # the answer means that the memory has been read


def compare(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """How many elements of these weights were compared with the model's, and how many differ."""
    with torch.no_grad(), _CompareWrites(model) as comparison:
        model.load_weights(named)  # type: ignore[operator]
    return comparison.num_compared, int(sum(comparison.differing))


class _CompareWrites(TorchDispatchMode):
    """Replaces each write to a parameter of the model with a comparison to that parameter."""

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
