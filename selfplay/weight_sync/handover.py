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

from selfplay.config import EngineConfig
from selfplay.distributed import World, all_reduce_sum, barrier
from selfplay.engines.base import Engine
from selfplay.errors import EngineFault
from selfplay.learner.learner import Learner
from selfplay.learner.mismatch import EngineDisagrees
from selfplay.weight_sync.faults import agreed
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.push import Pushed, compare, named_weights, push

# Memory that must be free beside an engine's weights and cache: its workspace and a push's buckets.
SPARE_BYTES = 6 * 2**30


def sleep_engine(engine: Engine | None, offload: Offload, world: World) -> None:
    """Put the engine to sleep, then onload the offloaded tensors. Every rank must call."""
    sleep_or_end(engine)
    barrier(world)
    offload.onload()


def sleep_or_end(engine: Engine | None) -> None:
    """Put the engine to sleep. If that fails, end it, which frees its memory too; the next push
    restarts it."""
    if engine is not None:
        try:
            engine.sleep()
        except EngineFault as fault:
            print(f"engine ended instead of put to sleep: {fault}", file=sys.stderr, flush=True)
            engine.close()


def sync_and_wake(
    learner: Learner, engine: Engine | None, offload: Offload, *, version: int, config: EngineConfig
) -> None:
    """Wake the engine, push the learner's weights as `version`, and allocate the KV cache again.

    Raises EngineDisagrees on every rank if the engine's weights differ from the learner's after two
    pushes. The engine is then awake and the offload complete. Raises EnginesFailed on every rank if
    any rank's engine fails (`restarts.Restarts.push` restarts it).
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

    `version` selects the two. One is a matrix, which detects every missed push: an AdamW step at
    1e-6 moves 1 in 100 elements of size 0.02 to the next bf16 number. The other is each parameter
    in turn. Correctly pushed weights are equal bit for bit, so there are no false alarms.
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
    """The number of elements of these parameters whose bits differ between the learner and any
    rank's engine. Every rank must call."""
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
    """Push the learner's weights to an engine with allocated weights; all ranks of a replica must
    call."""
    group, dtype = learner.world.replica.group, push_dtype(learner, config)
    with agreed(learner.world):
        return push(learner.model, engine, version=version, group=group, dtype=dtype)


def push_dtype(learner: Learner, config: EngineConfig) -> torch.dtype:
    """The dtype of the engine's weights: fp32 for the hf engine, the compute dtype for SGLang."""
    return torch.float32 if config.kind == "hf" else learner.compute_dtype


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
