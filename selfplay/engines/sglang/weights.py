"""Passes a trainer's weights to an SGLang engine, or has them compared there, bucket by bucket.

A bucket's buffer is opened by the engine's processes by a handle; each rank of a replica sends a
handle to its own gathered copy. Shapes: N elements of a flat buffer, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from selfplay.distributed import World
from selfplay.engines.base import Completion, Engine, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.sglang import buckets
from selfplay.engines.weights import Compared, Weights
from selfplay.errors import EngineFault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from selfplay.engines.sglang.engine import SGLangEngine

# Memory that must be free beside an engine's weights and cache: its workspace and a push's buckets.
SPARE_BYTES = 6 * 2**30


def load(
    weights: Weights, engine: SGLangEngine | None, group: dist.ProcessGroup | None, *, version: int
) -> None:
    """Pass all weights to the replica's engine, which is None on ranks that share another's.

    `group` is the replica's gloo group, its leader first, in the engine's rank order; None for a
    replica of one rank. The next bucket is filled while the engine loads one, so a GPU holds at
    most two. Raises ValueError on every rank of the replica, before anything is sent, if the
    parameters are not exactly the engine's, and EngineFault on every rank if the engine fails.
    """
    check_names(engine, weights.shapes, group)
    if engine is not None:
        engine.ledger.invalidate()  # incomplete until the last bucket is loaded
    sender, num_payloads = _Sender(group), _num_payloads(engine, group)
    for bucket in weights:
        names, sizes = [*bucket.shapes], [*bucket.shapes.values()]
        sender.wait()  # for the bucket before
        begin = None
        if engine is not None:
            begin = partial(engine.begin_bucket, names=names, version=version)
        # A handle can be opened only once, so each rank of the engine gets its own.
        payloads = [buckets.serialise(bucket.flat_N, names, sizes) for _ in range(num_payloads)]
        sender.send(bucket.flat_N, payloads, begin=begin)
        del bucket
    sender.wait()


def compare(
    weights: Weights, engine: SGLangEngine | None, group: dist.ProcessGroup | None
) -> Compared:
    """Have the engine compare these weights with its own. This rank's counts: of its own engine, or
    of its rank in a shared one. A model's loader that writes weights in an unknown way shows in too
    few compared elements. Raises EngineFault as `load` does."""
    sender, num_slots = _Sender(group), _num_payloads(engine, group)
    counts = torch.zeros(2, dtype=torch.int64)
    for bucket in weights:
        names, sizes = [*bucket.shapes], [*bucket.shapes.values()]
        slots_B = bucket.flat_N.new_zeros(num_slots * buckets.FOUND_BYTES, dtype=torch.uint8)
        buffer_B = torch.cat([slots_B, bucket.flat_N.view(torch.uint8)])
        del bucket
        payloads = [
            buckets.serialise_compared(buffer_B, names, sizes, rank=slot, ranks=num_slots)
            for slot in range(num_slots)
        ]
        sender.send(buffer_B, payloads, begin=None if engine is None else engine.begin_compare)
        sender.wait()
        counts += buffer_B[: len(slots_B)].view(torch.int64).view(-1, 2).sum(0).cpu()
    return Compared(*counts.tolist())


def make_room(device: torch.device, mem_fraction: float) -> None:
    """Empty the trainer's allocator cache if the engine needs the memory to wake.

    `mem_fraction` is the engine's share of the GPU. Keeping the allocator's cache saves the next
    update its allocations, and the engine wakes several times faster if no memory was freed just
    before (docs/gpu.md).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < mem_fraction * total + SPARE_BYTES:
            torch.cuda.empty_cache()


class EnginePart(Engine):
    """What a rank has of an SGLang engine that another rank of its replica leads: it plays nothing,
    and passes handles to its own gathered copies."""

    scores, num_copies = True, 0

    def __init__(self, world: World, dtype: torch.dtype, *, mem_fraction: float) -> None:
        """`dtype` and `mem_fraction` are those of the leader's engine."""
        self.dtype, self._mem_fraction = dtype, mem_fraction
        self._group, self._device = world.replica.group, world.device

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Raises ValueError if there are any."""
        if games := list(games):
            raise ValueError(f"a rank without an engine cannot play games, got {len(games)}")
        return []

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Raises ValueError if there are any."""
        if requests:
            raise ValueError(f"a rank without an engine answers nothing, got {len(requests)}")
        return []

    def score(self, texts: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        """Raises ValueError if there are any."""
        self.generate_batch([Request(ids, 1, 0) for ids in texts], Sampling(1.0, ()))
        return list

    def load(self, weights: Weights, version: int) -> None:
        """Gather this rank's copy and pass its handle to the leader, bucket by bucket."""
        load(weights, None, self._group, version=version)

    def compare(self, weights: Weights) -> Compared:
        """The counts of the engine's rank on this GPU."""
        return compare(weights, None, self._group)

    def wake(self, what: str) -> None:
        """The leader wakes the engine; this rank's GPU must have room for its part."""
        make_room(self._device, self._mem_fraction)


def _num_payloads(engine: SGLangEngine | None, group: dist.ProcessGroup | None) -> int:
    """How many of the engine's ranks this rank's buffer is for: its own in a replica of several
    ranks, else all of them."""
    return engine.num_ranks if engine is not None and group is None else 1


def check_names(
    engine: SGLangEngine | None,
    shapes: dict[str, torch.Size],
    group: dist.ProcessGroup | None,
) -> None:
    """The leader compares names and shapes; on a difference all ranks raise, before any gather."""
    wrong: str | None = None
    if engine is not None:
        try:
            engine.ledger.check_names(shapes)
        except ValueError as error:
            wrong = str(error)
    if (wrong := of_leader(wrong, group)) is not None:
        raise ValueError(wrong)


def of_leader(message: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The message of the replica's leader; every rank of the replica must call."""
    told = [message]
    if group is not None:
        dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]


class _Sender:
    """Passes buffers to the replica's engine, one at a time, and keeps each until it is read.

    Every rank of the replica makes the same calls, and all raise the engine's fault in `wait`.
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
        if begin is not None:
            try:
                self._finish = begin(payloads)
            except EngineFault as fault:
                self._fault = str(fault)

    def wait(self) -> None:
        """Wait until the engine has read the last buffer, then drop it. Raises EngineFault."""
        if self._buffer is None:
            return
        if self._finish is not None:
            try:
                self._finish()
            except EngineFault as fault:
                self._fault = str(fault)
        # The other ranks wait here: their buffers must outlive the engine's reads.
        self._fault = of_leader(self._fault, self._group)
        on_gpu, self._buffer, self._finish = self._buffer.is_cuda, None, None
        if on_gpu:  # free IPC buffers that the engine has closed; each push would leak its buckets
            torch.cuda.ipc_collect()
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
