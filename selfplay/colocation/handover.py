"""The GPU changes hands: the engine sleeps while the trainer works, then wakes with new weights.

    sleep → update → wake weights → push → compare → wake cache

so that the larger phase has to fit, not the sum; what fits beside it is kept. With an engine that
cannot sleep (on a CPU, or one that reads the trainer's own parameters) the same verbs do nothing.
Knows no games. Sizes in bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from selfplay.colocation.offload import Offload
from selfplay.colocation.weight_sync import Pushed, compare, named_weights, push
from selfplay.config import Config
from selfplay.distributed import World, all_reduce_sum, barrier
from selfplay.engines.base import Engine
from selfplay.learner.learner import Learner
from selfplay.learner.mismatch import EngineDisagrees

# What stays free beside an engine's weights and cache: its own work space, a push's buckets.
SPARE_BYTES = 6 * 2**30


def sleep_engine(engine: Engine | None, offload: Offload, world: World) -> None:
    """The engine gives its memory back, the trainer takes its own; all ranks of a replica wait."""
    if engine is not None:
        engine.sleep()
    barrier(world)
    offload.onload()


def sync_and_wake(
    learner: Learner, engine: Engine | None, offload: Offload, *, version: int, config: Config
) -> None:
    """The engine wakes, takes the learner's weights as `version`, and gets its cache back.

    Raises EngineDisagrees, on every rank and once all is in its place, when the engine does not
    hold the learner's weights after two pushes.
    """
    world, fraction = learner.world, config.engine.mem_fraction
    offload.offload_state()
    make_room(world.device, fraction)
    if engine is not None:
        engine.wake("weights")
    refused: EngineDisagrees | None = None
    try:
        deliver(learner, engine, version=version, config=config)
    except EngineDisagrees as error:
        refused = error
    offload.offload_parameters()
    make_room(world.device, fraction)
    if engine is not None:
        engine.wake("kv_cache")
    barrier(world)
    if refused is not None:
        raise refused


def deliver(learner: Learner, engine: Engine | None, *, version: int, config: Config) -> None:
    """Push, and compare two parameters bit for bit; where they differ push again and compare all.

    Which two changes with `version`: one is a matrix, which shows every missed push (one AdamW step
    at 1e-6 moves 1 in 100 elements of size 0.02 to the next number in bf16), one is any, so that
    all are compared in turn. Equal weights never differ, so this has no false alarms.
    """
    sync_weights(learner, engine, version=version, config=config)
    shapes = {name: weight.base.shape for name, weight in named_weights(learner.model)}
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    drawn = {matrices[version % len(matrices)], [*shapes][version % len(shapes)]}
    if num_different(learner, engine, sorted(drawn), config=config):
        tell("the engine does not hold the weights it was given: they are pushed again", learner)
        deliver_again(learner, engine, version=version, config=config)


def deliver_again(learner: Learner, engine: Engine | None, *, version: int, config: Config) -> None:
    """Push, and compare all parameters; raises EngineDisagrees on every rank when any differs."""
    sync_weights(learner, engine, version=version, config=config)
    names = [name for name, _ in named_weights(learner.model)]
    different = num_different(learner, engine, names, config=config)
    if different:
        raise EngineDisagrees(
            f"after two pushes of version {version} {different} elements of the engine's weights "
            "are not the trainer's"
        )


def num_different(
    learner: Learner, engine: Engine | None, names: Sequence[str], *, config: Config
) -> int:
    """Elements of these parameters in which any rank's engine differs from the learner, bit for
    bit. Every rank calls."""
    group, dtype = learner.world.replica.group, push_dtype(learner, config)
    found = compare(learner.model, engine, names, group=group, dtype=dtype)
    return int(all_reduce_sum([float(found.num_different)], learner.world)[0])


def tell(what: str, learner: Learner) -> None:
    """Warn the reader of the run, once."""
    if learner.world.rank == 0:
        print(f"sync: {what}", file=sys.stderr, flush=True)


def sync_weights(
    learner: Learner, engine: Engine | None, *, version: int, config: Config
) -> Pushed:
    """An engine whose weights are awake takes the learner's; all ranks of a replica call."""
    group, dtype = learner.world.replica.group, push_dtype(learner, config)
    return push(learner.model, engine, version=version, group=group, dtype=dtype)


def push_dtype(learner: Learner, config: Config) -> torch.dtype:
    """The hf engine generates with the fp32 master weights, SGLang in the dtype of computation."""
    return torch.float32 if config.engine.kind == "hf" else learner.compute_dtype


def make_room(device: torch.device, mem_fraction: float) -> None:
    """The trainer's allocator gives back all it keeps for later, where an engine that takes this
    share of the GPU could not wake beside it.

    What is kept spares the next update its allocations, and an engine wakes several times as fast
    where nothing was freed a moment ago (docs/gpu.md).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < mem_fraction * total + SPARE_BYTES:
            torch.cuda.empty_cache()
