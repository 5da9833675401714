"""Weight sync: pushes the trainer's weights to the engine and compares the two, bit for bit.

An engine in this process copies tensors by name. An SGLang engine loads buckets: flat buffers that
its processes open by a handle. Sizes in bytes. Shapes: N elements of a flat buffer, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from selfplay.distributed import full_tensor, gather_flat
from selfplay.engines.base import Engine
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang import buckets
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.errors import EngineFault
from selfplay.model.lora import Weight, plain_weights


def cast_full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The full parameter. A sharded one is cast before it is gathered, which moves fewer bytes;
    all ranks must call."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    return full_tensor(parameter.detach().to(dtype))


def push(
    model: nn.Module,
    engine: Engine | None,
    *,
    version: int,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> None:
    """Push this model's weights to the engine. All ranks of a sharded model call it together.

    `engine` is the replica's engine on its leader and None on its other ranks, which pass handles
    to their own gathered copies. `group` is the replica's gloo group, its leader first, in the
    engine's rank order; None for a replica of one rank. `dtype` is the engine's.
    The next bucket is filled while the engine loads one, so a GPU holds at most two.

    Raises ValueError on every rank of the replica, before anything is sent, if the model's
    parameters are not exactly the engine's, and EngineFault on every rank of the replica if the
    engine fails. Even then this rank joins every gather, so that the other ranks' pushes end.
    """
    weights = plain_weights(model)
    if engine is not None and not isinstance(engine, SGLangEngine):
        _copy_weights(model, cast(HFEngine, engine), weights, version=version, dtype=dtype)
        return
    if engine is None and group is None:
        raise ValueError("a rank without an engine must name its replica's group, got None")
    shapes = {name: torch.Size(weight.base.shape) for name, weight in weights.items()}
    _check_names(engine.ledger if engine is not None else None, shapes, group)
    device = next(iter(weights.values())).base.device
    if engine is not None:
        engine.ledger.invalidate()  # incomplete until the last bucket is loaded
    sender, num_payloads = _BucketSender(group), _num_payloads(engine, group)
    for names in buckets.plan_buckets(shapes, dtype, bucket_bytes=bucket_bytes):
        flat_N = gather_flat([weights[name].merged() for name in names], dtype=dtype, device=device)
        sizes = [shapes[name] for name in names]
        sender.wait()  # for the bucket before
        sender.send(
            flat_N,
            # A handle can be opened only once, so each rank of the engine gets its own.
            [buckets.serialise(flat_N, names, sizes) for _ in range(num_payloads)],
            begin=partial(engine.begin_bucket, names=names, version=version)
            if engine is not None
            else None,
        )
        del flat_N
    sender.wait()
    sender.raise_fault()


def _num_payloads(engine: SGLangEngine | None, group: dist.ProcessGroup | None) -> int:
    """How many of the engine's ranks this rank's buffer is for: its own in a replica of several
    ranks, else all of them."""
    return engine.num_ranks if engine is not None and group is None else 1


def _copy_weights(
    model: nn.Module,
    engine: HFEngine,
    weights: dict[str, Weight],
    *,
    version: int,
    dtype: torch.dtype,
) -> None:
    """Push to an engine in this process, which copies tensors by name. An engine that shares the
    model's parameters only gets the version."""
    if engine.shares(model):
        weights = {}
    named = ((name, cast_full_tensor(w.merged(), dtype)) for name, w in weights.items())
    try:
        engine.update_weights(named, version)
    except EngineFault:
        for _ in named:  # join each gather, for which the other ranks wait
            pass
        raise


def _check_names(
    ledger: buckets.Ledger | None,
    shapes: dict[str, torch.Size],
    group: dist.ProcessGroup | None,
) -> None:
    """The leader compares names and shapes; on a difference all ranks raise, before any gather."""
    message: list[str | None] = [None]
    if ledger is not None:
        try:
            ledger.check_names(shapes)
        except ValueError as error:
            message = [str(error)]
    if group is not None:
        dist.broadcast_object_list(message, group=group, group_src=0)
    if message[0] is not None:
        raise ValueError(message[0])


class _BucketSender:
    """Passes buffers to the replica's engine, one at a time, and keeps each until it is read.

    Every rank of the replica makes the same calls. After the engine's first fault it gets nothing
    more; all ranks know the fault after `wait`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._buffer: Tensor | None = None
        self._finish: Callable[[], None] | None = None
        self._fault: str | None = None

    def send(
        self,
        buffer: Tensor,
        payloads: list[bytes],
        *,
        begin: Callable[[list[bytes]], Callable[[], None]] | None,
    ) -> None:
        """Let the engine read this buffer. `payloads` open it, see `_num_payloads`.

        `begin` passes the payloads of all ranks to this rank's engine and returns a function that
        waits for it; None on a rank without one.
        """
        if buffer.is_cuda:  # the engine reads this memory, so the values must be final
            torch.cuda.current_stream(buffer.device).synchronize()
        self._buffer, payloads = buffer, self._gather(payloads)
        if begin is not None and self._fault is None:
            try:
                self._finish = begin(payloads)
            except EngineFault as fault:
                self._fault = str(fault)

    def wait(self) -> None:
        """Wait until the engine has read the last buffer, then drop it."""
        if self._buffer is None:
            return
        if self._finish is not None:
            try:
                self._finish()
            except EngineFault as fault:
                self._fault = str(fault)
        if self._group is not None:
            # The other ranks wait here: their buffers must outlive the engine's reads.
            message = [self._fault]
            dist.broadcast_object_list(message, group=self._group, group_src=0)
            [self._fault] = message
        on_gpu, self._buffer, self._finish = self._buffer.is_cuda, None, None
        if on_gpu:  # free IPC buffers that the engine has closed; each push would leak its buckets
            torch.cuda.ipc_collect()

    def raise_fault(self) -> None:
        """Raise EngineFault if the engine failed."""
        if self._fault is not None:
            raise EngineFault(self._fault)

    def _gather(self, payloads: list[bytes]) -> list[bytes]:
        """The payloads of all ranks of the replica, on its leader."""
        if self._group is None:
            return payloads
        leads = dist.get_rank(self._group) == 0
        gathered: list[Any] | None = [None] * dist.get_world_size(self._group) if leads else None
        dist.gather_object(payloads[0], gathered, group=self._group, group_dst=0)
        return gathered or []


@dataclass(frozen=True, slots=True)
class Compared:
    """How many elements of an engine's weights were compared, and how many differ. Each process of
    an engine counts its own copy, with its padding."""

    num_elements: int
    num_different: int


def compare(
    model: nn.Module,
    engine: Engine | None,
    names: Sequence[str],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> Compared:
    """Compare these parameters with the engine's, bit for bit, after a push; nothing is written.

    All ranks call it, as they call `push`, with the same `names` (those of `plain_weights`).
    Returns this rank's counts: of its own engine, or of its rank in a shared one. Equal weights
    always differ in 0 elements, because both sides come from the same cast of the same numbers. A
    model's loader that writes weights in an unknown way shows in too few compared elements.
    Raises EngineFault as `push` does.
    """
    selected = set(names)
    weights = {name: weight for name, weight in plain_weights(model).items() if name in selected}
    if engine is not None and not isinstance(engine, SGLangEngine):
        return _compare_here(model, cast(HFEngine, engine), weights, dtype=dtype)
    shapes = {name: torch.Size(weight.base.shape) for name, weight in weights.items()}
    device = next(iter(weights.values())).base.device
    num_slots = _num_payloads(engine, group)
    counts = torch.zeros(2, dtype=torch.int64)
    sender = _BucketSender(group)
    for bucket in buckets.plan_buckets(shapes, dtype, bucket_bytes=bucket_bytes):
        sizes = [shapes[name] for name in bucket]
        flat_N = gather_flat([weights[n].merged() for n in bucket], dtype=dtype, device=device)
        slots_B = flat_N.new_zeros(num_slots * buckets.FOUND_BYTES, dtype=torch.uint8)
        buffer_B = torch.cat([slots_B, flat_N.view(torch.uint8)])
        sender.send(
            buffer_B,
            [
                buckets.serialise_compared(buffer_B, bucket, sizes, rank=slot, ranks=num_slots)
                for slot in range(num_slots)
            ],
            begin=engine.begin_compare if engine is not None else None,
        )
        sender.wait()
        counts += buffer_B[: len(slots_B)].view(torch.int64).view(-1, 2).sum(0).cpu()
    sender.raise_fault()
    return Compared(*counts.tolist())


def _compare_here(
    model: nn.Module, engine: HFEngine, weights: dict[str, Weight], *, dtype: torch.dtype
) -> Compared:
    """Compare with an engine in this process. One that shares the model's parameters is equal."""
    num_elements = sum(weight.base.numel() for weight in weights.values())
    if engine.shares(model):
        return Compared(num_elements, 0)
    held = engine.held_weights()
    different = sum(
        int((held[n] != cast_full_tensor(w.merged(), dtype)).sum()) for n, w in weights.items()
    )
    return Compared(num_elements, different)
