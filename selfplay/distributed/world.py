"""Joins the processes into a device mesh and exchanges small values between ranks.

One mesh has both kinds of parallelism: FSDP shards every parameter over "dp"; tensor parallelism
splits heads, MLP and vocabulary over "tp". The ranks of one "tp" group are neighbours and process
the same tokens. A replica is a group of neighbouring ranks that share one engine; its first rank,
the leader, owns the engine and plays the replica's games.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from threading import Timer
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from selfplay.errors import EngineFault, EnginesFailed, OwnFault, RunEnds, own_fault


@dataclass(frozen=True, slots=True)
class Replica:
    """This rank's replica: number `index` of `num`, with `size` ranks; `leads` marks its leader.

    `group` is the replica's gloo group in the engine's rank order, None for a single rank.
    """

    index: int
    num: int
    size: int
    leads: bool
    group: dist.ProcessGroup | None

    def share(self, num_items: int) -> range:
        """This rank's items of a step: leaders share them evenly, other ranks have none."""
        return range(self.index, num_items, self.num) if self.leads else range(0)


def check_size(size: int, *, host_size: int) -> None:
    """Raise ValueError unless `size` divides the `host_size` ranks of each host.

    A single process starts an engine, on GPUs that it can see.
    """
    if size < 1 or host_size % size:
        nearest = max(n for n in range(1, max(1, size) + 1) if host_size % n == 0)
        raise ValueError(
            f"engine.tp_size must divide the {host_size} processes of each host, since an engine "
            f"cannot span hosts, got {size}; the nearest is {nearest}"
        )


def make_replica(
    rank: int, world_size: int, size: int, *, timeout: timedelta = timedelta(minutes=30)
) -> Replica:
    """Split the ranks into replicas of `size` ranks, which must pass `check_size`; `timeout` limits
    their collectives.

    Every rank must call this, because creating process groups is collective.
    """
    index, position = divmod(rank, size)
    group = None
    if size > 1:
        for first in range(0, world_size, size):
            ranks = list(range(first, first + size))
            new_group = dist.new_group(ranks, backend="gloo", timeout=timeout)
            if isinstance(new_group, dist.ProcessGroup):  # this rank is in it
                group = new_group
    return Replica(index, world_size // size, size, position == 0, group)


T = TypeVar("T")
# Long enough for an engine to start between two collectives, short enough to end the run soon if a
# rank is lost. `patience_s` is added to it.
TIMEOUT_S = 1800.0
WAIT_REPORT_S = 20.0  # after which a rank prints that it waits for others to start


@dataclass(frozen=True, slots=True)
class World:
    """This process's ranks, device and process groups.

    `mesh` is None for a single CPU process. `control` is a gloo group for small objects, None for a
    single process.
    `dp_size` * `tp` is `world_size`.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    dp_rank: int
    dp_size: int
    tp: int
    control: dist.ProcessGroup | None
    replica: Replica


def init_world(
    tp: int = 1,
    fsdp: int | None = None,
    *,
    engine_tp: int = 1,
    device: str | None = None,
    patience_s: float = 0.0,
) -> World:
    """Read torchrun's environment and join the process groups.

    `fsdp` defaults to the number of processes divided by `tp`. `engine_tp` neighbouring ranks of
    one host share one engine. `device` is "cuda" or "cpu" (default: cuda if available). A single
    CPU process joins no group. A single GPU gets a mesh of one rank, so that FSDP's mixed precision
    applies to it too. Raises ValueError if `tp` * `fsdp` is not the number of processes, or if
    `engine_tp` does not divide the processes of a host.
    """
    world_size = _number("WORLD_SIZE", 1, low=1)
    rank = _number("RANK", 0, below=world_size)
    local_rank = _number("LOCAL_RANK", 0, below=world_size)
    dp_size = data_parallel_size(world_size, tp, fsdp)
    check_size(engine_tp, host_size=_number("LOCAL_WORLD_SIZE", world_size, low=1))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    own_device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(own_device)
    mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    timeout = timedelta(seconds=TIMEOUT_S + patience_s)
    if world_size > 1 or kind == "cuda":
        waiting = Timer(WAIT_REPORT_S, _report_waiting, (rank, world_size))
        waiting.daemon = True
        waiting.start()
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                timeout=timeout,
                # A single process needs no rendezvous and no port.
                store=_own_keys(timeout) if world_size > 1 else dist.HashStore(),
                rank=rank,
                world_size=world_size,
            )
        finally:
            waiting.cancel()
        # Otherwise a child process would use torchrun's store for its process group.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        if world_size > 1:
            control = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        shape, names = ((dp_size, tp), ("dp", "tp")) if tp > 1 else ((dp_size,), ("dp",))
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=own_device,
        mesh=mesh,
        dp_rank=rank // tp,
        dp_size=dp_size,
        tp=tp,
        control=control,
        replica=make_replica(rank, world_size, engine_tp, timeout=timeout),
    )


def _report_waiting(rank: int, world_size: int) -> None:
    """Print which ranks have not started yet."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    missing = [0]  # rank 0 has the store, unless the launcher has it
    # A separate connection, because the process is blocked in the rendezvous.
    with suppress(RuntimeError, ValueError):
        store = dist.TCPStore(host, int(port), timeout=timedelta(seconds=2), wait_for_workers=False)
        first = 0 if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else 1
        missing = [r for r in range(first, world_size) if not store.check([_started(r)])]
    others = [each for each in missing if each != rank]
    print(
        f"rank {rank} waits at {host}:{port} until all {world_size} ranks of WORLD_SIZE have "
        f"started, at most {TIMEOUT_S / 60:g} minutes; missing: {', '.join(map(str, others))}; "
        "to run a single process, unset WORLD_SIZE",
        file=sys.stderr,
        flush=True,
    )


def _started(rank: int) -> str:
    """The store's key that marks a rank as started, in this start of the launcher."""
    return f"started {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {rank}"


_worlds = count()


def _own_keys(timeout: timedelta) -> dist.Store:
    """The launcher's store, with a prefix that no earlier world of these processes has used."""
    store = _launchers_store()
    store.set_timeout(timeout)
    return dist.PrefixStore(f"world_{next(_worlds)}", store)


@cache
def _launchers_store() -> dist.Store:
    store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
    whole = store.underlying_store if isinstance(store, dist.PrefixStore) else store
    whole.set(_started(rank), "")
    return store


def data_parallel_size(world_size: int, tp: int, fsdp: int | None) -> int:
    """The number of data-parallel ranks.

    Raises ValueError if `tp` * `fsdp` is not `world_size`, or if `tp` does not divide it.
    """
    if tp < 1 or world_size % tp:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - tp))
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


def _number(variable: str, default: int, *, low: int = 0, below: int = 1_000_000) -> int:
    """The integer value of an environment variable set by a launcher.

    Raises ValueError, which names the variable, unless it is in [low, below).
    """
    text = os.environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and low <= int(text) < below):
        raise ValueError(
            f"{variable} must be an integer from {low} to {below - 1}, got {text!r}; torchrun sets "
            "it"
        )
    return int(text)


def close_world(world: World) -> None:
    """Leave the process groups; a single CPU process has none."""
    if world.mesh is not None:
        # A gloo thread frees the tensors of its last collective shortly after the collective
        # returns, and needs the GIL for that. Exiting earlier aborts the process ("terminate
        # called without an active exception"), so release the GIL here for a moment.
        time.sleep(0.1)
        dist.destroy_process_group()


# The functions below use gloo: they exchange Python values and never touch a GPU stream.


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


def broadcast_object(value: T, world: World) -> T:
    """Rank 0's value, on every rank."""
    if world.control is None:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=world.control)
    received: T = box[0]
    return received


def gather_objects(value: T, world: World) -> list[T]:
    """Every rank's value in rank order, on every rank."""
    if world.control is None:
        return [value]
    pickled = torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)
    sizes = torch.zeros(world.world_size, dtype=torch.int64)
    sizes[world.rank] = len(pickled)
    dist.all_reduce(sizes, group=world.control)
    # Broadcasts instead of an all-gather: gloo's in torch 2.13 has caused double frees.
    values = []
    for rank, size in enumerate(sizes.tolist()):
        data = pickled if rank == world.rank else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, src=rank, group=world.control)
        values.append(pickle.loads(data.numpy().data))
    return values


def exchange_objects(outgoing: Sequence[T], world: World) -> list[T]:
    """Send `outgoing[r]` to each rank r; return the values received, in rank order.

    A rank's value for itself is returned unchanged. Unlike `gather_objects`, each rank receives
    only its own values.
    """
    if world.control is None:
        return list(outgoing)
    pickled = [
        np.frombuffer(b"" if rank == world.rank else pickle.dumps(value, protocol=5), np.uint8)
        for rank, value in enumerate(outgoing)
    ]
    sizes = [len(data) for data in pickled]
    incoming = [row[world.rank] for row in gather_objects(sizes, world)]
    sent = torch.from_numpy(np.concatenate(pickled))
    received = torch.empty(sum(incoming), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, incoming, sizes, group=world.control)
    return [
        outgoing[rank] if rank == world.rank else pickle.loads(memoryview(part.numpy()))
        for rank, part in enumerate(received.split(incoming))
    ]


def on_first_rank(action: Callable[[], T], world: World) -> T:
    """Rank 0's result of `action`, on every rank; the others wait, and its ValueError, OSError or
    RunEnds is raised on all."""
    found: tuple[Any, Exception | None] = None, None
    if world.rank == 0:
        try:
            found = action(), None
        except (ValueError, OSError, RunEnds) as error:
            found = None, error
    value, failure = broadcast_object(found, world)
    if failure is not None:
        raise failure
    return cast("T", value)


def torch_switches() -> dict[str, Any]:
    """The global PyTorch settings that affect results, by the functions that change them."""
    return {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_default_device": torch.get_default_device(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def check_switches(before: Mapping[str, Any]) -> None:
    """Restore a switch that has changed, and raise OwnFault."""
    now = torch_switches()
    for name, value in before.items():
        if now[name] != value:
            getattr(torch, name.removeprefix("torch."))(value)
            raise OwnFault(f"custom code must not change {name} from {value}, got {now[name]}")


@contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Raise a fault of this block on every rank: an OwnFault if custom code fails, otherwise
    EnginesFailed for each EngineFault.

    A changed PyTorch switch is a fault too, because it would silently change results. Every rank
    must enter the block. A rank keeps its fault until the end of the block: if it raised inside a
    collective, the other ranks would wait for it. Such blocks may be nested, but must not contain
    other collectives.
    """
    fault: EngineFault | OwnFault | None = None
    cause: BaseException | None = None
    before = torch_switches()
    try:
        yield
        check_switches(before)
    except (Exception, SystemExit) as error:
        fault, cause = error if isinstance(error, EngineFault) else own_fault(error), error
        if fault is None or getattr(fault, "everywhere", False):
            raise
    own = isinstance(fault, OwnFault)
    # For the engine's faults, the other ranks of a replica only repeat their leader.
    reports = fault is not None and (own or world.replica.leads)
    found = gather_objects((own, str(fault)) if reports else None, world)
    faults = {rank: one for rank, one in enumerate(found) if one is not None}
    for of_own_code, text in faults.values():
        if of_own_code:
            shared = OwnFault(text)
            shared.everywhere = True
            raise shared from cause
    if faults:
        raise EnginesFailed({rank: text for rank, (_, text) in faults.items()}) from cause


def barrier(world: World) -> None:
    """Wait until every rank has called this."""
    if world.control is not None:
        dist.barrier(group=world.control)
