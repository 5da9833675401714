"""Start this rank's engine with the weights of a folder."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import export_once
from selfplay.config import ChosenEngine, Config, OptimConfig
from selfplay.data.seeds import named_seed
from selfplay.distributed import World, barrier, broadcast_object
from selfplay.engines.base import Engine
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang.choose import choose, describe, load_of
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.launch import config_of_partner, expected_parameters
from selfplay.model.hub import described_in
from selfplay.model.policy import DTYPES, load_model
from selfplay.model.stored import check_tensors
from selfplay.weight_sync.supervisor import EngineLost


def choose_engine(
    config: Config, weights: Path, world: World, *, rewritten: str, notes: Path | None = None
) -> tuple[Config, ChosenEngine]:
    """The settings with an engine whose `auto` is replaced for these weights, and that engine.

    `rewritten` is that of the rendering. Every rank must call. Rank 0 prints what was chosen, and
    appends it to the file `notes`.
    """
    num_weights = 0
    if config.engine.kind == "sglang":
        shapes = expected_parameters(str(described_in(weights)))
        num_weights = sum(shape.numel() for shape in shapes.values())
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size)) // world.replica.size
    load = load_of(
        config,
        num_weights,
        replicas=world.replica.num,
        continues=not rewritten,
        cores=len(os.sched_getaffinity(0)) // max(1, of_host),
        gpu=world.device.type == "cuda",
    )
    engine = broadcast_object(choose(config.engine, load), world)
    if world.rank == 0 and engine.kind == "sglang":
        line = describe(engine, load)
        print(line, flush=True)
        if notes is not None:
            with notes.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return replace(config, engine=engine), engine


def load_engine(
    config: Config,
    weights: Path,
    world: World,
    *,
    cleanup: ExitStack,
    load_format: str = "auto",
) -> Engine | None:
    """An engine with the weights of this folder; None on a rank that shares another rank's engine.

    `config` is that of `choose_engine`. `cleanup` closes the engine. With `load_format` "dummy"
    SGLang starts with random weights, which the first push replaces; the folder then needs only a
    config. Raises EngineLost if none starts.
    """
    if config.engine.kind == "hf":
        # The hf engine cannot generate with sharded parameters, so each rank's has a full copy.
        copy = load_whole(weights, config, world, dtype=torch.float32)
        return HFEngine(copy.requires_grad_(False), max_batch=config.engine.max_batch)
    weights = merged_folder(weights, world, config.optim)
    if not world.replica.leads:
        return None
    assert isinstance(config.engine, ChosenEngine)
    # An evaluation's policies may come from runs with engines of other sizes.
    chosen = replace(config.engine, tp_size=world.replica.size)
    engine = _sglang_engine(config, chosen, weights, world, load_format=load_format)
    cleanup.callback(engine.close)
    return engine


def load_partner_engine(config: Config, weights: Path, world: World) -> SGLangEngine | None:
    """An SGLang engine for a frozen partner with the weights of this folder. It stays awake beside
    the policy's. None on a rank that shares another rank's. Every rank must call.

    Raises EngineLost if it does not start, SettingsError if too little GPU memory is free.
    """
    weights = merged_folder(weights, world, config.optim)
    if not world.replica.leads:
        return None
    assert isinstance(config.engine, ChosenEngine)
    chosen = config_of_partner(
        replace(config.engine, tp_size=world.replica.size),
        str(weights),
        expected_parameters(str(weights)),
        gpu=_first_gpu(world) if world.device.type == "cuda" else None,
        itemsize=DTYPES[config.model.dtype].itemsize,
        context=config.rollout.max_game_tokens,
    )
    return _sglang_engine(config, chosen, weights, world)


def _sglang_engine(
    config: Config, chosen: ChosenEngine, weights: Path, world: World, *, load_format: str = "auto"
) -> SGLangEngine:
    """An engine with these settings, of a rank that leads its replica. Raises SettingsError for a
    folder that SGLang would read in another way than the trainer."""
    if load_format == "auto":
        check_tensors(weights)
    if world.device.type == "cuda":
        gc.collect()  # free the warm start's memory before the engine takes its share
        torch.cuda.empty_cache()
    try:
        return SGLangEngine(
            str(weights),
            chosen,
            device=world.device.type,
            dtype=config.model.dtype,
            # SGLang's longest prompt is the context less 6 tokens, with its answer less 2.
            context_length=config.rollout.max_game_tokens + 8,
            seed=named_seed(config.seed, "engine", world.replica.index),
            base_gpu_id=_first_gpu(world),
            load_format=load_format,
        )
    except (RuntimeError, OSError) as error:  # a child has printed its own traceback
        raise EngineLost(f"the engine does not start: {error}") from error


def _first_gpu(world: World) -> int:
    """The first GPU of this rank's engine."""
    return world.local_rank // world.replica.size * world.replica.size


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
