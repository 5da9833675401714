"""Measures GPU memory in each phase, and times an engine's sleep, wake, pushes and plain copies.

Seconds end in _s, sizes are in GiB. Memory is the use of a GPU by all processes together.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from bench.update import GIB, timed
from selfplay.config import Config
from selfplay.distributed import World, barrier
from selfplay.engines.base import Engine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.learner import Learner
from selfplay.weight_sync.push import named_weights, push
from selfplay.weight_sync.supervisor import push_dtype


class Peaks:
    """The peak GPU memory of each phase in GiB, sampled by a thread every 10 ms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gib: dict[str, float] = {}

    def look(self, phase: str) -> None:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.gib[phase] = max(self.gib.get(phase, 0.0), (total - free) / GIB)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                self.look(phase)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.look(phase)
            done.set()
            thread.join()


def nap(engine: SGLangEngine | None, world: World) -> dict[str, float]:
    """Seconds for the engine to sleep and to wake, with nothing else on the GPU."""
    verbs: dict[str, Callable[[SGLangEngine], None]] = {
        "sleep_s": lambda awake: awake.sleep(),
        "wake_weights_s": lambda asleep: asleep.wake("weights"),
        "wake_cache_s": lambda asleep: asleep.wake("kv_cache"),
    }
    seconds = {
        name: _seconds(partial(verb, engine) if engine is not None else None, world)
        for name, verb in verbs.items()
    }
    if engine is not None:
        engine.sleep()
    barrier(world)
    return seconds


def lone_pushes(
    learner: Learner, engine: Engine | None, config: Config, *, version: int
) -> dict[str, float]:
    """The median seconds of three pushes with everything awake, so without wakes and onloads.

    Returns {} if the parameters are offloaded to the host.
    """
    if config.parallel.offload == "all":
        return {}
    dtype, group = push_dtype(learner, config.engine), learner.world.replica.group
    once = partial(push, learner.model, engine, version=version, group=group, dtype=dtype)
    lone_s = statistics.median(_seconds(once, learner.world) for _ in range(3))
    num_elements = sum(weight.base.numel() for _, weight in named_weights(learner.model))
    gib = num_elements * dtype.itemsize / GIB
    return {"lone_push_s": lone_s, "lone_push_gib_per_s": gib / lone_s}


def _seconds(verb: Callable[[], object] | None, world: World) -> float:
    """Seconds until all ranks have called `verb`. A rank without one waits for the others."""
    barrier(world)
    began_s = time.perf_counter()
    if verb is not None:
        verb()
    barrier(world)
    return time.perf_counter() - began_s


def copy_ceiling(device: torch.device) -> float:
    """GiB per second of a plain copy on the device. Each GiB is read once and written once."""
    num_bytes = GIB if device.type == "cuda" else 2**24
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = timed(lambda: target.copy_(source), device, num=5)
    return num_bytes / GIB / seconds
