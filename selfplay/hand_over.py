"""The GPU changes hands: the engine sleeps while the trainer works, then wakes with new weights.

    sleep → update → wake weights → push → wake cache → gate

so that the larger phase has to fit, not the sum; what fits beside it is kept. With an engine that
cannot sleep (on a CPU, or one that reads the trainer's own parameters) the same verbs do nothing.
Knows no games. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch.distributed.fsdp import FSDPModule

from selfplay.batch import micro_batches
from selfplay.config import Config
from selfplay.engines.base import Engine
from selfplay.engines.sglang import SGLangEngine
from selfplay.learner import Learner, batch_logprobs, even_out, is_filler
from selfplay.offload import Offload
from selfplay.parallel import World, barrier, gather_objects
from selfplay.samples import Sample
from selfplay.sync import Pushed, push, verify

# Read of each game's end. A pass over so few costs the launching of its kernels, however many.
GATE_TOKENS = 64
# What stays free beside an engine's weights and cache: its own work space, a push's buckets.
SPARE_BYTES = 6 * 2**30


def lend(engine: Engine | None, offload: Offload, world: World) -> None:
    """The engine gives its memory back, the trainer takes its own; all ranks of a replica wait."""
    if engine is not None:
        engine.sleep()
    barrier(world)
    offload.fetch()


def give_back(
    learner: Learner, engine: Engine | None, offload: Offload, *, version: int, config: Config
) -> None:
    """The engine wakes, takes the learner's weights as `version`, and gets its cache back."""
    world, fraction = learner.world, config.engine.mem_fraction
    offload.stow_state()
    make_room(world.device, fraction)
    if engine is not None:
        engine.wake("weights")
    push_policy(learner, engine, version=version, config=config)
    offload.stow_parameters()
    make_room(world.device, fraction)
    if engine is not None:
        engine.wake("kv_cache")
    barrier(world)


def push_policy(learner: Learner, engine: Engine | None, *, version: int, config: Config) -> Pushed:
    """An engine whose weights are awake takes the learner's; all ranks of a replica call."""
    # The hf engine generates with the fp32 master weights, SGLang in the dtype of computation.
    dtype = torch.float32 if config.engine.kind == "hf" else learner.compute_dtype
    group = learner.world.replica.group
    return push(learner.model, engine, version=version, group=group, dtype=dtype)


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


def gate(
    learner: Learner,
    engine: Engine | None,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    config: Config,
) -> dict[str, float]:
    """Let engine and trainer score a few turns at the same time; raises RuntimeError when they
    disagree.

    `turns` are ids and a 1 for each that counts, of this rank's last games, whose ends are read;
    every rank must call. The hf engine reads the policy's parameters or an exact copy; parameters
    that wait on the host cannot score. The update compares its whole rollout anyway.
    """
    world = learner.world
    if config.engine.kind == "hf" or config.parallel.offload_parameters:
        return {}
    mine = [
        Sample(f"{world.rank}/{i}", [*ids[-GATE_TOKENS:]], [0, *counts[-GATE_TOKENS:][1:]], [], [])
        for i, (ids, counts) in enumerate(turns)
    ]
    answers = None
    if engine is not None:
        assert isinstance(engine, SGLangEngine)
        answers = engine.begin_scoring([sample.ids for sample in mine])
    by_trainer = _scored(learner, mine, config=config)
    by_engine: dict[str, list[float]] = {}
    if answers is not None:
        for sample, logprobs in zip(mine, answers(), strict=True):
            by_engine[sample.name] = list(compress(logprobs, sample.mask[1:]))
    parts = gather_objects((by_engine, by_trainer), world)
    trainers = {name: logprobs for _, part in parts for name, logprobs in part.items()}
    engines = {name: logprobs for part, _ in parts for name, logprobs in part.items()}
    if not engines:
        return {}
    found = verify(
        [x for logprobs in engines.values() for x in logprobs],
        [x for name in engines for x in trainers[name]],
        bound=config.engine.max_gap,
    )
    return {"gate_gap": found.mean_abs}


def _scored(learner: Learner, mine: Sequence[Sample], *, config: Config) -> dict[str, list[float]]:
    """The trainer's log-probs, at temperature 1, of what counts in this rank's share of all ranks'
    samples, by name."""
    world = learner.world
    everyone = [sample for part in gather_objects(mine, world) for sample in part]
    share = everyone[world.dp_rank :: world.dp_size]
    budget = config.optim.tokens_per_microbatch
    found: dict[str, list[float]] = {sample.name: [] for sample in share}
    for batch in even_out(micro_batches(share, budget=budget, device=world.device), world):
        with torch.no_grad():
            logprobs_M, _ = batch_logprobs(learner, learner.model, batch, temperature=1.0)
        if not is_filler(batch):
            for place, logprob in zip(batch.sample_M.tolist(), logprobs_M.tolist(), strict=True):
                found[batch.names[place]].append(logprob)
    if isinstance(learner.model, FSDPModule):
        learner.model.reshard()  # without a backward pass nobody else drops the gathered copy
    return found
