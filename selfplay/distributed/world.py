"""Processes and the mesh they form, and how ranks agree on small things. Knows no models.

One device mesh carries both kinds of parallelism: "dp", over which every parameter is sharded, and
"tp", over which heads, MLP and vocabulary are divided. The ranks of one "tp" row are neighbours
and see the same tokens.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from selfplay.distributed.replica import Replica, check_size, make_replica

T = TypeVar("T")
# Long enough for an engine to start between two collectives, short enough that a lost rank ends
# the run.
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class World:
    """Where this process stands. `mesh` is None for one CPU process; `control` is a gloo group for
    small objects; `dp_size` * `tp` is `world_size`."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp: int
    control: dist.ProcessGroup | None
    replica: Replica


def init_world(
    tp: int = 1, fsdp: int | None = None, *, engine_tp: int = 1, device: str | None = None
) -> World:
    """Read torchrun's environment and join the others; `fsdp` defaults to all that `tp` leaves.
    `engine_tp` neighbouring ranks of one host share one engine.

    One CPU process joins nothing. One GPU makes a mesh of one, so that it gets FSDP's mixed
    precision like many. `device` is "cuda" or "cpu" (default: cuda where there is one). Raises
    ValueError when `tp` * `fsdp` is not the number of processes, or `engine_tp` does not divide a
    host's.
    """
    world_size = _number("WORLD_SIZE", 1, low=1)
    rank = _number("RANK", 0, below=world_size)
    local_rank = _number("LOCAL_RANK", 0, below=world_size)
    dp_size = data_parallel_size(world_size, tp, fsdp)
    check_size(engine_tp, host_size=_number("LOCAL_WORLD_SIZE", world_size, low=1))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    here = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(here)
    if world_size == 1 and kind == "cpu":
        return World(0, 1, 0, here, None, 0, 1, 0, 1, None, make_replica(0, 1, engine_tp))
    # One process needs no rendezvous, so it takes no port.
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=TIMEOUT_S),
        **(alone if world_size == 1 else {}),
    )
    # A child of this process that starts a process group of its own would take up torchrun's store.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    shape, names = ((dp_size, tp), ("dp", "tp")) if tp > 1 else ((dp_size,), ("dp",))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    dp_rank, tp_rank = divmod(rank, tp)
    replica = make_replica(rank, world_size, engine_tp)
    return World(
        rank, world_size, local_rank, here, mesh, dp_rank, dp_size, tp_rank, tp, control, replica
    )


def _number(variable: str, default: int, *, low: int = 0, below: int = 1_000_000) -> int:
    """A launcher's environment variable. Raises ValueError that names it for anything but a whole
    number from `low` up to `below`, exclusive."""
    text = os.environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and low <= int(text) < below):
        raise ValueError(
            f"{variable} must be a whole number from {low} to {below - 1}, got {text!r}; torchrun "
            "sets it"
        )
    return int(text)


def data_parallel_size(world_size: int, tp: int, fsdp: int | None) -> int:
    """The ranks left for FSDP, after checking that the two sizes make up the world."""
    if tp < 1 or world_size % tp:
        nearest = min(_divisors(world_size), key=lambda n: abs(n - tp))
        raise ValueError(
            f"parallel.tp must divide the number of processes ({world_size}), got {tp}; "
            f"the nearest is {nearest}"
        )
    if fsdp is not None and tp * fsdp != world_size:
        raise ValueError(
            f"parallel.tp * parallel.fsdp must be the number of processes ({world_size}), "
            f"got {tp} * {fsdp}; with this tp, fsdp is {world_size // tp}"
        )
    return world_size // tp


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def close_world(world: World) -> None:
    """Leave the process groups; nothing to do for one CPU process."""
    if world.mesh is not None:
        # A gloo thread drops the tensors of its last collective a moment after that has returned,
        # and needs the interpreter's lock for it. An exit before that moment aborts the process
        # ("terminate called without an active exception"), so the lock is given up here.
        time.sleep(0.1)
        dist.destroy_process_group()


# What follows goes over gloo: it moves Python values and never touches a GPU stream.


def all_reduce_sum(values: list[float], world: World) -> list[float]:
    """Each value's sum over all ranks, in float64."""
    if world.control is None or not values:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, group=world.control)
    sums: list[float] = numbers.tolist()
    return sums


def all_reduce_max(value: float, world: World) -> float:
    """The largest value of any rank."""
    if world.control is None:
        return value
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=world.control)
    return float(number)


def broadcast_object(value: T, world: World, *, source: int = 0) -> T:
    """Rank `source`'s value, on every rank."""
    if world.control is None:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=source, group=world.control)
    received: T = box[0]
    return received


def gather_objects(value: T, world: World) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    if world.control is None:
        return [value]
    boxes: list[Any] = [None] * world.world_size
    dist.all_gather_object(boxes, value, group=world.control)
    return boxes


def exchange_objects(outgoing: Sequence[T], world: World) -> list[T]:
    """Every rank has one value for each rank and gets one from each, in rank order; its own comes
    back as it is. Unlike `gather_objects` nobody unpacks what is meant for another."""
    if world.control is None:
        return list(outgoing)
    packed = [
        np.frombuffer(b"" if rank == world.rank else pickle.dumps(value, protocol=5), np.uint8)
        for rank, value in enumerate(outgoing)
    ]
    sizes = [len(one) for one in packed]
    incoming = [row[world.rank] for row in gather_objects(sizes, world)]
    sent = torch.from_numpy(np.concatenate(packed))
    received = torch.empty(sum(incoming), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, incoming, sizes, group=world.control)
    return [
        outgoing[rank] if rank == world.rank else pickle.loads(memoryview(part.numpy()))
        for rank, part in enumerate(received.split(incoming))
    ]


def on_first_rank(action: Callable[[], object], world: World) -> None:
    """Let rank 0 act while the others wait; the ValueError or OSError it ends in is raised on every
    rank."""
    failure: Exception | None = None
    if world.rank == 0:
        try:
            action()
        except (ValueError, OSError) as error:
            failure = error
    failure = broadcast_object(failure, world)
    if failure is not None:
        raise failure


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.control is not None:
        dist.barrier(group=world.control)
