"""Chooses and starts this rank's engine, with the weights of a folder."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfplay.chat.tokenizer import load_tokenizer
from selfplay.checkpoint import export_once
from selfplay.config import Config, EngineConfig, OptimConfig
from selfplay.distributed import World, barrier, broadcast_object
from selfplay.engines.base import Engine
from selfplay.engines.kinds import engine_kind
from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang.choose import describe, load_of
from selfplay.model.hub import described_in
from selfplay.model.policy import DTYPES, load_model


def choose_engine(
    config: Config, weights: Path, world: World, *, rewritten: str, notes: Path | None = None
) -> tuple[Config, EngineConfig]:
    """The settings with each `auto` of the engine replaced for these weights, and that section.

    `rewritten` comes from the rendering. Every rank must call. Rank 0 prints the choice and appends
    it to the file `notes`.
    """
    kind = engine_kind(config.engine.kind)
    num_weights = kind.num_weights(weights)
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size)) // world.replica.size
    load = load_of(
        config,
        num_weights,
        replicas=world.replica.num,
        continues=not rewritten,
        cores=len(os.sched_getaffinity(0)) // max(1, of_host),
        gpu=world.device.type == "cuda",
    )
    engine = broadcast_object(kind.choose(config.engine, load), world)
    if world.rank == 0 and isinstance(engine, ChosenEngine):
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
) -> Engine:
    """An engine with the weights of this folder. Every rank must call.

    `config` comes from `choose_engine`. `cleanup` closes the engine. With `load_format` "dummy"
    the folder needs only a config. Raises EngineLost if the engine does not start.
    """
    kind = engine_kind(config.engine.kind)
    if kind.needs_merged(config.engine):
        weights = merged_folder(weights, world, config.optim)
    engine = kind.start(config, weights, world, load_format=load_format)
    cleanup.callback(engine.close)
    return engine


def load_partner_engine(config: Config, weights: Path, world: World) -> Engine | None:
    """An engine for a frozen partner with the weights of this folder (`Engine.start_partner`).
    Every rank must call."""
    weights = merged_folder(weights, world, config.optim)
    return engine_kind(config.engine.kind).start_partner(config, weights, world)


def load_whole(
    weights: Path, config: Config, world: World, *, dtype: torch.dtype
) -> PreTrainedModel:
    """The unsharded model of a folder, on this rank's device or split by `engine.device_map`."""
    if config.engine.device_map is None:
        return load_model(str(weights), device=world.device, dtype=dtype)
    weights = merged_folder(weights, world, config.optim)  # transformers cannot split adapters
    return load_model(str(weights), device=config.engine.device_map, dtype=dtype)


def merged_folder(weights: Path, world: World, optim: OptimConfig) -> Path:
    """A folder that SGLang can read: the folder itself, or `merged/` in a folder of adapters.

    `merged/` holds the policy as a finished run exports it, and is written if it is missing. Every
    rank must call.
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
