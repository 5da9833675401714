"""The GPU changes hands: the engine sleeps while the trainer works, then wakes with new weights.

    sleep → update → wake weights → push → wake cache → gate

so that the larger phase has to fit, not the sum; what fits beside it is kept. With an engine that
cannot sleep (on a CPU, or one that reads the trainer's own parameters) the same verbs do nothing.
Knows no games. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from selfplay.batch import micro_batches
from selfplay.config import Config
from selfplay.engines.base import Engine, Request, Sampling
from selfplay.learner import Learner, batch_logprobs, even_out
from selfplay.offload import Offload
from selfplay.parallel import World, barrier, gather_objects
from selfplay.samples import Sample
from selfplay.sync import Pushed, push, verify

# Of each of many beginnings little is read and sampled: an engine's steps cost time one after the
# other, and so does reading. Four tokens of 16 tell stale weights (0.06 to 0.6 nats off) from equal
# ones (0.01).
GATE_PROMPT_TOKENS, GATE_TOKENS = 64, 4
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
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    config: Config,
) -> dict[str, float]:
    """Let engine and trainer score a few fresh turns; raises RuntimeError when they disagree.

    `prompts` are beginnings of this rank's last games, whose ends are read; every rank must call.
    The hf engine reads the policy's parameters or an exact copy; parameters that wait on the host
    cannot score. The update compares its whole rollout anyway.
    """
    world = learner.world
    if config.engine.kind == "hf" or config.parallel.offload_parameters:
        return {}
    mine: list[Sample] = []
    if engine is not None and prompts:
        asked = [
            Request(tuple(ids[-GATE_PROMPT_TOKENS:]), GATE_TOKENS, seed)
            for seed, ids in enumerate(prompts)
        ]
        for request, said in zip(asked, engine.generate(asked, sampling), strict=True):
            unread = [0] * len(request.prompt_ids)
            mine.append(
                Sample(
                    name="gate",
                    ids=[*request.prompt_ids, *said.ids],
                    mask=[*unread, *[1] * len(said.ids)],
                    old_logprobs=[*map(float, unread), *said.logprobs],
                    advantages=[0.0] * (len(unread) + len(said.ids)),
                )
            )
    everyone = [sample for part in gather_objects(mine, world) for sample in part]
    if not everyone:
        return {}
    engine_T: list[float] = []
    trainer_T: list[float] = []
    share = everyone[world.dp_rank :: world.dp_size]
    batches = micro_batches(share, budget=config.optim.tokens_per_microbatch, device=world.device)
    for batch in even_out(batches, world):
        with torch.no_grad():
            logprobs_M, _ = batch_logprobs(
                learner, learner.model, batch, temperature=sampling.temperature
            )
        if batch.names != ("",):
            engine_T += batch.old_logprobs_M.tolist()
            trainer_T += logprobs_M.tolist()
    if isinstance(learner.model, FSDPModule):
        learner.model.reshard()  # without a backward pass nobody else drops the gathered copy
    parts = gather_objects((engine_T, trainer_T), world)
    found = verify(
        [x for part, _ in parts for x in part],
        [x for _, part in parts for x in part],
        bound=config.engine.max_gap,
    )
    return {"gate_gap": found.mean_abs}
