"""Weight buffers for an SGLang engine: buckets, payloads, their comparison, what the engine holds.

A bucket is one flat tensor of full parameters under Hugging Face names. A payload is the message
from which one tensor-parallel rank of the engine opens a bucket: a CUDA IPC handle, or shared
memory on a CPU.

`compare_in_engine` compares a bucket bit for bit with the weights in the engine's own process,
where SGLang calls it as a custom weight loader. It runs the model's own `load_weights`, as a push
does, so this file needs no description of fused, padded and sharded layouts. Each write to a
parameter becomes a comparison. The counts go back through the buffer that the trainer shares with
the engine, because SGLang ends the scheduler when a custom loader raises. Sizes in bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LOADER = "selfplay.engines.sglang.buckets.compare_in_engine"
FOUND_BYTES = 16  # one rank's result: elements compared and elements that differ, int64 each
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)


def serialise(flat_N: Tensor, names: Sequence[str], shapes: Sequence[torch.Size]) -> bytes:
    """A payload of this bucket for one rank of the engine.

    Make one for each rank, because a handle can be opened only once. `flat_N` has a storage of its
    own. It must hold its final values (on CUDA synchronize first), must not be written again, and
    must live until the engine has answered.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, start = [], 0
    for name, shape in zip(names, shapes, strict=True):
        num_bytes = math.prod(shape) * flat_N.element_size()
        metadata.append(
            FlattenedTensorMetadata(
                name=name,
                shape=shape,
                dtype=flat_N.dtype,
                start_idx=start,
                end_idx=start + num_bytes,
                numel=num_bytes,
            )
        )
        start += num_bytes
    flat = _sent(flat_N.view(torch.uint8))
    return _payload({"flattened_tensor": flat, "metadata": metadata}, flat_N)


def serialise_compared(
    buffer_B: Tensor, names: Sequence[str], shapes: Sequence[torch.Size], *, rank: int, ranks: int
) -> bytes:
    """A payload for `compare_in_engine`. Its buffer has a result slot of FOUND_BYTES for each rank,
    then the values as a push lays them out. Its name is JSON that describes both."""
    values = [[name, list(shape)] for name, shape in zip(names, shapes, strict=True)]
    description = json.dumps({"rank": rank, "ranks": ranks, "values": values})
    return _payload([(description, _sent(buffer_B))], buffer_B)


def _payload(message: Any, shared: Tensor) -> bytes:
    """The serialized message; its `shared` tensor is sent as a handle, not as values."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if shared.is_cuda:
        # The patch names devices by UUID, because their numbers may differ in the engine.
        monkey_patch_torch_reductions()
    return bytes(MultiprocessingSerializer.serialize(message))


class SharedMemory:
    """A flat tensor on a CPU, moved to shared memory. It is pickled as a call that opens the same
    memory in any process of this user while this tensor lives.

    Torch's own ways need a parent-child relation, or a further process that must answer within a
    second, which on a busy machine it does not.
    """

    def __init__(self, flat_N: Tensor) -> None:
        assert flat_N.untyped_storage().nbytes() == flat_N.numel() * flat_N.element_size()
        self._flat_N = flat_N

    def __reduce__(self) -> tuple[Any, ...]:
        descriptor, _ = self._flat_N.untyped_storage()._share_fd_cpu_()
        size, dtype = self._flat_N.numel(), self._flat_N.dtype
        opened = partial(torch.from_file, shared=True, size=size, dtype=dtype)
        return opened, (f"/proc/{os.getpid()}/fd/{descriptor}",)


def _sent(bytes_B: Tensor) -> Any:
    """What is pickled for a buffer: a handle to its memory on a GPU, a shared memory on a CPU."""
    return bytes_B if bytes_B.is_cuda else SharedMemory(bytes_B)


def compare_in_engine(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Compare the values of a buffer of `serialise_compared` with the model's; write the counts to
    this rank's slot."""
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
    counts = torch.tensor(compare(model, named), dtype=torch.int64)
    slots_B.view(torch.int64).view(-1, 2)[description["rank"]] = counts.to(buffer_B.device)
    if buffer_B.is_cuda:
        torch.cuda.synchronize()


def compare(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """How many elements of these weights were compared with the model's, and how many differ."""
    with torch.no_grad(), _CompareWrites(model) as comparison:
        model.load_weights(named)  # type: ignore[operator]
    return comparison.num_compared, int(sum(comparison.differing))


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


class Ledger:
    """Tracks which parameters the engine holds; a push must send each exactly once.

    SGLang itself only warns of unknown names and ignores missing ones.
    """

    def __init__(self, expected: Mapping[str, torch.Size], *, complete: bool) -> None:
        self.expected = dict(expected)
        self._missing = set() if complete else set(expected)

    @property
    def complete(self) -> bool:
        """Whether the engine holds every parameter, all of one version."""
        return not self._missing

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ValueError unless these are exactly the engine's parameter names and shapes."""
        unknown = sorted(shapes.keys() - self.expected.keys())
        missing = sorted(self.expected.keys() - shapes.keys())
        wrong = [f"{n} {list(s)}" for n, s in shapes.items() if self.expected.get(n, s) != s]
        if unknown or missing or wrong:
            raise ValueError(
                f"a push must carry the engine's {len(self.expected)} parameters, got "
                f"{len(shapes)}: unknown {unknown[:3]}, missing {missing[:3]}, of another shape "
                f"{wrong[:3]}"
            )

    def expect(self, names: Sequence[str]) -> bool:
        """Announce a bucket; return whether it completes the weights.

        The first bucket of a push invalidates all parameters. Raises ValueError for a parameter
        that is unknown or was already received in this push.
        """
        if self.complete:
            self.invalidate()
        unknown = sorted(set(names) - self._missing)
        if unknown:
            raise ValueError(f"a bucket has unknown or repeated parameters: {unknown[:3]}")
        return not self._missing.difference(names)

    def receive(self, names: Sequence[str]) -> None:
        """Record that the engine has loaded these parameters."""
        self._missing.difference_update(names)

    def invalidate(self) -> None:
        """Record that the engine's weights are invalid."""
        self._missing = set(self.expected)
