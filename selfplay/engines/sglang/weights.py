"""Passes the trainer's weights to an SGLang engine to load or to compare, bucket by bucket.

The engine's processes open a bucket's buffer by a handle (`buckets`). With `engine.fast` each rank
of a replica sends a handle to its own gathered copy; otherwise the leader sends one handle to all.
Shapes: N elements of a flat buffer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from selfplay.distributed import World
from selfplay.engines.base import Engine, GameCoroutine, Generate, Sampling
from selfplay.engines.weights import Bucket, Compared, Weights
from selfplay.errors import EngineFault

T = TypeVar("T")

# Memory that must stay free besides an engine's weights and cache: its workspace and the buckets.
SPARE_BYTES = 6 * 2**30

# Lets the engine start to read a bucket, with the folder of `buckets.message` ("" to load it); the
# returned function waits until the engine has read it.
Begin = Callable[[Bucket, str], Callable[[], None]]


def load(
    weights: Weights,
    group: dist.ProcessGroup | None,
    begin: Begin,
    *,
    expected: Mapping[str, torch.Size] | None,
) -> None:
    """Pass all weights to the replica's engine; on the leader `expected` has its parameters.

    `group` is the replica's gloo group, its leader first, in the engine's rank order; None for a
    replica of one rank. Raises ValueError on every rank of the replica, before anything is sent, if
    the parameters are not exactly the engine's, and EngineFault on every rank if the engine fails.
    """
    wrong = None if expected is None else why_other(weights.shapes, expected)
    if (wrong := from_leader(wrong, group)) is not None:
        raise ValueError(wrong)
    _pass_on(weights, group, begin, "")


def compare(weights: Weights, group: dist.ProcessGroup | None, begin: Begin) -> Compared:
    """Have the engine compare these weights with its own; returns the counts of the engine's ranks
    that read this rank's copy. If a model's loader writes weights in an unknown way, too few
    elements are compared. Raises EngineFault as `load` does."""
    with tempfile.TemporaryDirectory() as folder:
        _pass_on(weights, group, begin, folder)
        lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    counts = [json.loads(line) for line in lines]
    return Compared(sum(num for num, _ in counts), sum(different for _, different in counts))


def why_other(shapes: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> str | None:
    """Why these are not exactly the engine's parameters; None if they are. SGLang itself only warns
    about unknown names and ignores missing ones."""
    unknown, missing = sorted(shapes.keys() - expected), sorted(expected.keys() - shapes)
    wrong = [f"{n} {list(s)}" for n, s in shapes.items() if expected.get(n, s) != s]
    if not (unknown or missing or wrong):
        return None
    return (
        f"a push must carry the engine's {len(expected)} parameters, got {len(shapes)}: unknown "
        f"{unknown[:3]}, missing {missing[:3]}, wrong shape {wrong[:3]}"
    )


def _pass_on(weights: Weights, group: dist.ProcessGroup | None, begin: Begin, folder: str) -> None:
    """Let the replica's engine read each bucket while the next one is gathered: a GPU holds at
    most two. Every rank of the replica calls, and all raise the leader's fault."""
    wait: Callable[[], None] | None = None
    fault: str | None = None
    held: Bucket | None = None
    for bucket in chain(weights, (None,)):
        if held is not None:
            if wait is not None:
                _, fault = _attempt(wait)
            # The other ranks wait here: their buffers must outlive the engine's reads.
            fault = from_leader(fault, group)
            on_gpu, held, wait = held.flat_N.is_cuda, None, None
            if on_gpu:  # free IPC buffers that the engine has closed; a push would leak its buckets
                torch.cuda.ipc_collect()
            if fault is not None:
                raise EngineFault(fault)
        if bucket is not None:
            if bucket.flat_N.is_cuda:  # the engine reads this memory, so the values must be final
                torch.cuda.current_stream(bucket.flat_N.device).synchronize()
            held = bucket
            wait, fault = _attempt(partial(begin, bucket, folder))
        del bucket


def _attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of a call, and the message of its EngineFault."""
    try:
        return call(), None
    except EngineFault as fault:
        return None, str(fault)


def from_leader(message: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The message of the replica's leader; every rank of the replica must call."""
    box = [message]
    if group is not None:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def make_room(device: torch.device, room: float) -> None:
    """Empty the trainer's allocator cache if the engine needs the memory to wake.

    `room` are the bytes of its weights and caches (`launch.room_of`). A kept cache saves the next
    update its allocations, and the engine wakes several times faster if no memory was freed just
    before (docs/gpu.md).
    """
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < room + SPARE_BYTES:
        torch.cuda.empty_cache()


def purpose(folder: str) -> str:
    """The purpose of a bucket with this folder, for error messages."""
    return "a comparison of weights" if folder else "a weight push"


def skip(_bucket: Bucket, _folder: str) -> Callable[[], None]:
    """The `Begin` of a rank whose copy no engine reads: it only took part in the gather."""
    return lambda: None


class EnginePart(Engine):
    """A rank's part of an SGLang engine that another rank of its replica leads: it plays nothing,
    but takes part in the gathers of each push."""

    scores, num_copies = True, 0
    begin: Begin = staticmethod(skip)

    def __init__(self, world: World, dtype: torch.dtype, *, room: float) -> None:
        """`dtype` is that of the leader's engine, `room` what `make_room` takes."""
        self.dtype, self._room = dtype, room
        self._group, self._device = world.replica.group, world.device

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Raises ValueError if there are any."""
        return _none(games)

    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        """Raises ValueError if there are any."""
        return partial(_none, texts)

    def load(self, weights: Weights, version: int) -> None:
        """Gather every bucket along with the leader. Raises the leader's fault."""
        load(weights, self._group, self.begin, expected=None)

    def compare(self, weights: Weights) -> Compared:
        """The counts of the engine's rank that reads this rank's copy, if one does."""
        return compare(weights, self._group, self.begin)

    def wake(self, what: str) -> None:
        """Make room on this rank's GPU; the leader wakes the engine."""
        make_room(self._device, self._room)


def _none(asked: Iterable[Any]) -> list[Any]:
    if num := len(list(asked)):
        raise ValueError(f"a rank without an engine plays and answers nothing, got {num}")
    return []
