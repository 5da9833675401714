"""Engine and trainer take turns on the GPU: the engine sleeps during the update.

    sleep → update → wake weights → sync weights → compare → wake cache

Only the larger of the two phases has to fit into the memory; what fits next to it stays there.
Engines that cannot sleep (on a CPU, or one that reads the trainer's own parameters) ignore sleep
and wake. Sizes in bytes. Knows no games.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from selfplay.colocation.faults import agreed
from selfplay.colocation.offload import Offload
from selfplay.colocation.weight_sync import Pushed, compare, named_weights, push
from selfplay.config import EngineConfig
from selfplay.distributed import World, all_reduce_sum, barrier
from selfplay.engines.base import Engine, EngineFault
from selfplay.learner.learner import Learner
from selfplay.learner.mismatch import EngineDisagrees

# Stays free next to an engine's weights and cache: its work space and the buckets of a push.
SPARE_BYTES = 6 * 2**30


def sleep_engine(engine: Engine | None, offload: Offload, world: World) -> None:
    """The engine frees its memory, then the offloaded tensors return. Every rank calls."""
    sleep_or_end(engine)
    barrier(world)
    offload.onload()


def sleep_or_end(engine: Engine | None) -> None:
    """The engine frees its memory. One that fails to is ended, which frees its memory too; the next
    push restarts it."""
    if engine is not None:
        try:
            engine.sleep()
        except EngineFault as fault:
            print(f"engine ended instead of put to sleep: {fault}", file=sys.stderr, flush=True)
            engine.close()


def sync_and_wake(
    learner: Learner, engine: Engine | None, offload: Offload, *, version: int, config: EngineConfig
) -> None:
    """The engine wakes, takes the learner's weights as `version`, and allocates its cache again.

    Raises EngineDisagrees on every rank if the engine's weights differ from the learner's after two
    pushes. By then the engine is awake and the offload is complete. Raises EnginesFailed on every
    rank if any rank's engine fails (`restarts.Restarts.push` restarts it).
    """
    world, fraction = learner.world, config.mem_fraction
    offload.offload_state()
    make_room(world.device, fraction)
    with agreed(world):
        if engine is not None:
            engine.wake("weights")
    failure: EngineDisagrees | None = None
    try:
        deliver(learner, engine, version=version, config=config)
    except EngineDisagrees as error:
        failure = error
    offload.offload_parameters()
    make_room(world.device, fraction)
    with agreed(world):
        if engine is not None:
            engine.wake("kv_cache")
    if failure is not None:
        raise failure


def deliver(learner: Learner, engine: Engine | None, *, version: int, config: EngineConfig) -> None:
    """Push and compare two parameters bit for bit; on a difference push again and compare all.

    `version` selects the two. One is a matrix, which shows every missed push: an AdamW step at 1e-6
    moves 1 in 100 elements of size 0.02 to the next bf16 number. The other runs through all
    parameters in turn. Equal weights never differ, so there are no false alarms.
    """
    sync_weights(learner, engine, version=version, config=config)
    shapes = {name: weight.base.shape for name, weight in named_weights(learner.model)}
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    selected = {matrices[version % len(matrices)], [*shapes][version % len(shapes)]}
    if num_different(learner, engine, sorted(selected), config=config):
        warn("the engine's weights differ from the trainer's: they are pushed again", learner)
        deliver_again(learner, engine, version=version, config=config)


def deliver_again(
    learner: Learner, engine: Engine | None, *, version: int, config: EngineConfig
) -> None:
    """Push and compare all parameters; raises EngineDisagrees on every rank if any differs."""
    sync_weights(learner, engine, version=version, config=config)
    names = [name for name, _ in named_weights(learner.model)]
    different = num_different(learner, engine, names, config=config)
    if different:
        raise EngineDisagrees(
            f"weight sync failed: after two pushes of version {version} {different} elements of "
            "the engine's weights differ from the trainer's"
        )


def num_different(
    learner: Learner, engine: Engine | None, names: Sequence[str], *, config: EngineConfig
) -> int:
    """How many elements of these parameters differ in bits between the learner and any rank's
    engine. Every rank calls."""
    group, dtype = learner.world.replica.group, push_dtype(learner, config)
    with agreed(learner.world):
        compared = compare(learner.model, engine, names, group=group, dtype=dtype)
    return int(all_reduce_sum([float(compared.num_different)], learner.world)[0])


def warn(message: str, learner: Learner) -> None:
    """Print a warning on rank 0."""
    if learner.world.rank == 0:
        print(f"weight sync: {message}", file=sys.stderr, flush=True)


def sync_weights(
    learner: Learner, engine: Engine | None, *, version: int, config: EngineConfig
) -> Pushed:
    """Push the learner's weights to an engine whose weights are awake; all ranks of a replica
    call."""
    group, dtype = learner.world.replica.group, push_dtype(learner, config)
    with agreed(learner.world):
        return push(learner.model, engine, version=version, group=group, dtype=dtype)


def push_dtype(learner: Learner, config: EngineConfig) -> torch.dtype:
    """The hf engine generates with the fp32 master weights, SGLang in the dtype of computation."""
    return torch.float32 if config.kind == "hf" else learner.compute_dtype


def make_room(device: torch.device, mem_fraction: float) -> None:
    """Empty the trainer's allocator cache if the engine needs the memory to wake.

    `mem_fraction` is the engine's share of the GPU. A cache that stays saves the next update its
    allocations, and an engine wakes several times as fast if nothing was freed just before
    (docs/gpu.md).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < mem_fraction * total + SPARE_BYTES:
            torch.cuda.empty_cache()
