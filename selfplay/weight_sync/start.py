"""Start this rank's engine with the weights of a folder."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import export_once
from selfplay.config import Config, OptimConfig
from selfplay.distributed import World, barrier
from selfplay.engines.base import Engine
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.model.hub import described_in
from selfplay.model.policy import DTYPES, load_model
from selfplay.weight_sync.supervisor import EngineLost


def load_engine(
    config: Config,
    weights: Path,
    world: World,
    *,
    cleanup: ExitStack,
    load_format: str = "auto",
) -> Engine | None:
    """An engine with the weights of this folder; None on a rank that shares another rank's engine.

    `cleanup` closes it. With `load_format` "dummy" SGLang starts with random weights, which the
    first push replaces; the folder then needs only a config. Raises EngineLost if none starts.
    """
    if config.engine.kind == "hf":
        # The hf engine cannot generate with sharded parameters, so each rank's has a full copy.
        copy = load_whole(weights, config, world, dtype=torch.float32)
        return HFEngine(copy.requires_grad_(False), max_batch=config.engine.max_batch)
    weights = merged_folder(weights, world, config.optim)
    if not world.replica.leads:
        return None
    if world.device.type == "cuda":
        gc.collect()  # free the warm start's memory before the engine takes its share
        torch.cuda.empty_cache()
    try:
        engine = SGLangEngine(
            str(weights),
            # An evaluation's policies may come from runs with engines of other sizes.
            replace(config.engine, tp_size=world.replica.size),
            device=world.device.type,
            dtype=config.model.dtype,
            context_length=config.rollout.max_game_tokens + 8,
            seed=config.seed + world.replica.index,
            base_gpu_id=world.local_rank // world.replica.size * world.replica.size,
            load_format=load_format,
        )
    except (RuntimeError, OSError) as error:  # a child has printed its own traceback
        raise EngineLost(f"the engine does not start: {error}") from error
    cleanup.callback(engine.close)
    return engine


def load_whole(
    weights: Path, config: Config, world: World, *, dtype: torch.dtype
) -> PreTrainedModel:
    """The unsharded model of a folder, on this rank's device or split by `engine.device_map`."""
    if config.engine.device_map is None:
        return load_model(str(weights), device=world.device, dtype=dtype)
    weights = merged_folder(weights, world, config.optim)  # transformers splits no adapters
    return load_model(str(weights), device=config.engine.device_map, dtype=dtype)


def merged_folder(weights: Path, world: World, optim: OptimConfig) -> Path:
    """A folder that SGLang can read: the folder itself, or `merged/` in a folder of adapters.

    `merged/` holds the policy as `finish` exports it and is written here if it is missing. Every
    rank calls.
    """
    if described_in(weights) == weights:
        return weights
    merged = weights / "merged"
    if world.rank == 0 and not merged.exists():
        print(f"merging adapters into {merged}", flush=True)
        dtype = DTYPES[optim.master_dtype]
        policy = load_model(str(weights), device="cpu", dtype=dtype)
        export_once(policy, load_tokenizer(weights), merged)
    barrier(world)
    return merged
