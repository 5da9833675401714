"""Weight sync: pushes the trainer's weights to the engine and compares the two, bit for bit.

Sizes in bytes, times in seconds. Shapes: N elements of a flat buffer, B bytes. Knows no games and
no text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from selfplay.distributed import gather_flat
from selfplay.engines.base import Engine
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang import weights as sglang_push
from selfplay.engines.sglang.compare import FOUND_BYTES
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.errors import EngineFault
from selfplay.model.lora import Weight, plain_weights

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing, torch.compile


@dataclass(frozen=True, slots=True)
class Pushed:
    """The size of a push, and this rank's seconds spent gathering and waiting for the engine."""

    num_bytes: int
    num_buckets: int
    gather_s: float
    engine_s: float


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Weights under their Hugging Face names, without the names of wrappers; a tied head appears
    once. `Weight.merged` adds the adapters."""
    for name, weight in plain_weights(model).items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, weight


def cast_full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The full parameter. A sharded one is cast before it is gathered, which moves fewer bytes;
    all ranks must call."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    cast = parameter.detach().to(dtype)
    assert isinstance(cast, DTensor)
    return cast.full_tensor()


def push(
    model: nn.Module,
    engine: Engine | None,
    *,
    version: int,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    bucket_bytes: int = sglang_push.BUCKET_BYTES,
) -> Pushed:
    """Push this model's weights to the engine. All ranks of a sharded model call it together.

    `engine` is the replica's engine on its leader and None on its other ranks, which pass handles
    to their own gathered copies. `group` is the replica's gloo group, its leader first, in the
    engine's rank order; None for a replica of one rank. `dtype` and `device` are the engine's.
    The next bucket is filled while the engine loads one, so a GPU holds at most two.

    Raises ValueError on every rank of the replica, before anything is sent, if the model's
    parameters are not exactly the engine's, and EngineFault on every rank of the replica if the
    engine fails. Even then this rank joins every gather, so that the other ranks' pushes end.
    """
    weights = dict(named_weights(model))
    shapes = {name: torch.Size(weight.base.shape) for name, weight in weights.items()}
    if engine is not None and not isinstance(engine, SGLangEngine):
        shared = isinstance(engine, HFEngine) and engine.model is model
        return _copy_into(engine, {} if shared else weights, version=version, dtype=dtype)
    if engine is None and group is None:
        raise ValueError("a rank without an engine must name its replica's group, got None")
    _check_names(engine.weights if engine is not None else None, shapes, group)
    if device is None:
        device = next(iter(weights.values())).base.device
    if engine is not None:
        engine.weights.lose()  # incomplete until the last bucket is loaded
    buckets = sglang_push.plan_buckets(shapes, dtype, bucket_bytes=bucket_bytes)
    gather_s = engine_s = 0.0
    loading: _Loading | None = None
    faults: list[str] = []
    for names in buckets:
        began_s = time.perf_counter()
        sizes = [shapes[name] for name in names]
        flat_N = gather_flat([weights[name].merged() for name in names], dtype=dtype, device=device)
        if flat_N.is_cuda:  # the engine reads this memory, so the values must be final
            torch.cuda.current_stream(device).synchronize()
        filled_s = time.perf_counter()
        if loading is not None:
            faults += loading.finish()
        loading = _Loading(
            flat_N,
            partial(engine.begin_bucket, names=names, version=version)
            if engine is not None and not faults
            else None,
            num_engine_ranks=engine.num_ranks if engine is not None else 0,
            payload=_push_payload(flat_N, names, sizes),
            group=group,
        )
        del flat_N
        gather_s += filled_s - began_s
        engine_s += time.perf_counter() - filled_s
    if loading is not None:
        began_s = time.perf_counter()
        faults += loading.finish()
        engine_s += time.perf_counter() - began_s
    if faults:
        raise EngineFault(faults[0])
    num_bytes = sum(map(math.prod, shapes.values())) * dtype.itemsize
    return Pushed(num_bytes, len(buckets), gather_s, engine_s)


def _copy_into(
    engine: Engine, weights: dict[str, Weight], *, version: int, dtype: torch.dtype
) -> Pushed:
    """Push to an engine in this process, which copies tensors by name. An engine that shares the
    model's parameters only gets the version."""
    began_s = time.perf_counter()
    named = ((name, cast_full_tensor(w.merged(), dtype)) for name, w in weights.items())
    try:
        engine.update_weights(named, version)
    except EngineFault:
        for _ in named:  # join each gather, for which the other ranks wait
            pass
        raise
    num_bytes = sum(w.base.numel() for w in weights.values()) * dtype.itemsize
    return Pushed(num_bytes, 1, 0.0, time.perf_counter() - began_s)


def _check_names(
    weights: sglang_push.Ledger | None,
    shapes: dict[str, torch.Size],
    group: dist.ProcessGroup | None,
) -> None:
    """The leader compares names and shapes; on a difference all ranks raise, before any gather."""
    message: list[str | None] = [None]
    if weights is not None:
        try:
            weights.check_names(shapes)
        except ValueError as error:
            message = [str(error)]
    if group is not None:
        dist.broadcast_object_list(message, group=group, group_src=0)
    if message[0] is not None:
        raise ValueError(message[0])


def _push_payload(
    flat_N: Tensor, names: Sequence[str], shapes: Sequence[torch.Size]
) -> Callable[[int], bytes]:
    return lambda _rank: sglang_push.serialise(flat_N, names, shapes)


def _compare_payload(
    buffer_B: Tensor, names: Sequence[str], shapes: Sequence[torch.Size], *, num_slots: int
) -> Callable[[int], bytes]:
    return lambda rank: sglang_push.serialise_compared(
        buffer_B, names, shapes, rank=rank, ranks=num_slots
    )


class _Loading:
    """One bucket that the engine's ranks are loading; keeps its buffer until they have read it."""

    def __init__(
        self,
        buffer: Tensor,
        begin: Callable[[list[bytes]], Callable[[], None]] | None,
        *,
        num_engine_ranks: int,
        payload: Callable[[int], bytes],
        group: dist.ProcessGroup | None,
    ) -> None:
        """`begin` passes payloads to this rank's engine and returns a function that waits for it;
        None without an engine or after it failed. `payload` makes the payload for one engine rank
        from this trainer rank's buffer."""
        self._buffer, self._group = buffer, group
        self._wait: Callable[[], None] | None = None
        self._fault: str | None = None
        if group is None:
            # One trainer rank may lead an engine of several GPUs or processes; each of its ranks
            # opens its own handle.
            payloads = [payload(rank) for rank in range(num_engine_ranks)]
        else:
            leads = dist.get_rank(group) == 0
            gathered: list[Any] | None = [None] * dist.get_world_size(group) if leads else None
            dist.gather_object(payload(0), gathered, group=group, group_dst=0)
            payloads = gathered or []
        if begin is not None:
            try:
                self._wait = begin(payloads)
            except EngineFault as fault:
                self._fault = str(fault)

    def finish(self) -> list[str]:
        """Wait until the engine has read the bucket. Returns its fault on all ranks, [] if none."""
        if self._wait is not None:
            try:
                self._wait()
            except EngineFault as fault:
                self._fault = str(fault)
        message = [self._fault]
        if self._group is not None:
            # The other ranks wait here: their buffers must outlive the engine's reads.
            dist.broadcast_object_list(message, group=self._group, group_src=0)
        device = self._buffer.device
        del self._buffer
        sglang_push.collect(device)
        return [fault for fault in message if fault is not None]


@dataclass(frozen=True, slots=True)
class Compared:
    """How many elements of an engine's weights were compared, and how many differ."""

    num_elements: int
    num_different: int


def compare(
    model: nn.Module,
    engine: Engine | None,
    names: Sequence[str],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    bucket_bytes: int = sglang_push.BUCKET_BYTES,
) -> Compared:
    """Compare these parameters with the engine's, bit for bit, after a push; nothing is written.

    All ranks call it, as they call `push`, with the same `names` (those of `named_weights`).
    Returns this rank's counts: of its own engine, or of its rank in a shared one. Equal weights
    always differ in 0 elements, because both sides come from the same cast of the same numbers.
    Raises EngineFault as `push` does.
    """
    selected = set(names)
    weights = {name: weight for name, weight in named_weights(model) if name in selected}
    if engine is not None and not isinstance(engine, SGLangEngine):
        return _compare_here(model, engine, weights, dtype=dtype)
    shapes = {name: torch.Size(weight.base.shape) for name, weight in weights.items()}
    if device is None:
        device = next(iter(weights.values())).base.device
    num_slots = engine.num_ranks if engine is not None and group is None else 1
    counts = torch.zeros(2, dtype=torch.int64)
    faults: list[str] = []
    for bucket in sglang_push.plan_buckets(shapes, dtype, bucket_bytes=bucket_bytes):
        sizes = [shapes[name] for name in bucket]
        flat_N = gather_flat([weights[n].merged() for n in bucket], dtype=dtype, device=device)
        slots_B = flat_N.new_zeros(num_slots * FOUND_BYTES, dtype=torch.uint8)
        buffer_B = torch.cat([slots_B, flat_N.view(torch.uint8)])
        if buffer_B.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        faults += _Loading(
            buffer_B,
            engine.begin_compare if engine is not None and not faults else None,
            num_engine_ranks=num_slots,
            payload=_compare_payload(buffer_B, bucket, sizes, num_slots=num_slots),
            group=group,
        ).finish()
        counts += buffer_B[: len(slots_B)].view(torch.int64).view(-1, 2).sum(0).cpu()
    if faults:
        raise EngineFault(faults[0])
    return Compared(*counts.tolist())


def _compare_here(
    model: nn.Module, engine: Engine, weights: dict[str, Weight], *, dtype: torch.dtype
) -> Compared:
    """Compare with an engine in this process that has its own model."""
    if not isinstance(engine, HFEngine) or engine.model is model:
        return Compared(0, 0)
    in_engine = dict(engine.model.named_parameters())
    different = sum(
        int((in_engine[n] != cast_full_tensor(w.merged(), dtype)).sum()) for n, w in weights.items()
    )
    return Compared(sum(w.base.numel() for w in weights.values()), different)
