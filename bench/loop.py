"""A whole step at true sizes: the engine's start, each stage's seconds, memory in each phase.

    python -m bench.loop --shape 0.5B                                          one GPU
    torchrun --nproc-per-node 4 -m bench.loop --shape 7B --tp 2 --fsdp 2       a 2 x 2 mesh
    python -m bench.loop --dry-run [--engine sglang]                           a tiny shape on a CPU

The stages are train.py's, on 8x8 games with everything a seat reads in full. Random weights never
end a turn and never agree, so each game is a row of tries of `--turn-tokens` by one seat, each
refused and answered, and its reward is drawn: how long a step takes does not depend on what is
said. The first step is smaller and warms up; the others count, by their median. Memory is what all
processes hold of a GPU (sampled), the most of any GPU. Seconds end in _s, sizes are GiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.memory import Peaks, lone_pushes, nap
from bench.shapes import SHAPES, qwen2_config, random_model
from selfplay.chat.rendering import make_rendering
from selfplay.colocation.handover import sleep_engine, sync_and_wake
from selfplay.colocation.offload import Offload
from selfplay.colocation.sync_check import NUM_TURNS, SyncCheck
from selfplay.config import Config, load_config
from selfplay.credit.advantages import assign_advantages, reward_samples, sample_statistics
from selfplay.data.seeds import named_seed
from selfplay.data.stream import TrainStream
from selfplay.distributed import (
    World,
    all_reduce_max,
    barrier,
    broadcast_object,
    close_world,
    gather_objects,
    init_world,
)
from selfplay.engines.base import Engine, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.batch import share_by_tokens
from selfplay.learner.learner import Learner, UpdateSettings
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.policy_update import update_policy
from selfplay.learner.recompute import recompute_logprobs
from selfplay.metrics.log import Stopwatch
from selfplay.metrics.step import step_metrics
from selfplay.model.liger import liger_is_here
from selfplay.model.policy import DTYPES
from selfplay.rollout.driver import first_turns, play_games
from selfplay.rollout.episode import Episode, limits_of
from selfplay.rollout.seating import self_play_games
from selfplay.setup import make_tokenizer

STAGES = ("play", "credit", "sleep", "score", "update", "push", "gate")
# Games a GPU: about as many as make a step of 10 to 20 s.
GAMES = {"0.5B": 512, "1.5B": 256, "7B": 96, "tiny": 4}
# As configs/qwen2.5_7b.yaml says for one GPU; what the command line says wins over these.
LONE_7B = [
    "parallel.checkpointing=full",
    "optim.master_dtype=bfloat16",
    "engine.mem_fraction=0.25",
    "optim.tokens_per_microbatch=8192",
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks of the update")
    parser.add_argument("--fsdp", type=int, default=None)
    parser.add_argument("--engine-tp", type=int, default=None, help="default: as --tp")
    parser.add_argument("--games", type=int, default=None, help="a GPU; by shape if not given")
    parser.add_argument("--tries", type=int, default=4, help="of a game")
    parser.add_argument("--turn-tokens", type=int, default=64, help="sampled a try")
    parser.add_argument("--steps", type=int, default=2, help="timed, after one that warms up")
    parser.add_argument("--mem-fraction", type=float, default=None, help="0.3; 0.25: a lone 7B")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--engine", choices=["sglang", "hf"], default=None, help="hf to dry-run")
    parser.add_argument("--checkpointing", default=None, help="none or full; full for a lone 7B")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="any setting")
    parser.add_argument("--out", type=Path, default=None, help="append one JSON line here")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on the CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shape, chosen.tries, chosen.turn_tokens, chosen.steps = "tiny", 2, 8, 1
        chosen.attention = "auto"
    chosen.engine = chosen.engine or ("hf" if chosen.dry_run else "sglang")
    chosen.games = chosen.games or GAMES[chosen.shape]
    return chosen


def settings(options: argparse.Namespace, folder: Path, num_ranks: int) -> Config:
    """A run's settings for this shape. The scratch section only shapes the tokenizer."""
    lone_7b = options.shape == "7B" and num_ranks == 1
    group_size = min(8, options.games)
    engine_tp = options.engine_tp or options.tp
    said = {
        "engine.mem_fraction": options.mem_fraction,
        "parallel.checkpointing": options.checkpointing,
    }
    return load_config(
        None,
        [
            f"out={folder}",
            f"model.dtype={'float32' if options.dry_run else 'bfloat16'}",
            "model.scratch={vocab_size: 8000, tokenizer_games: 40, max_positions: 8192}",
            "game.keep=all",
            "warm_start.keep=all",
            f"rollout.instances={max(1, options.games * num_ranks // group_size)}",
            f"rollout.group_size={group_size}",
            f"rollout.max_retries={options.tries - 1}",
            f"rollout.max_new_tokens={options.turn_tokens}",
            f"engine.kind={options.engine}",
            f"engine.max_batch={max(64, options.games * engine_tp)}",  # no graphs for more
            "engine.mem_fraction=0.3",
            f"engine.attention={options.attention}",
            f"engine.tp_size={engine_tp}",
            "engine.max_mismatch=0.5",  # random weights make large logits, which bf16 resolves badly
            f"parallel.tp={options.tp}",
            *(LONE_7B if lone_7b else []),
            *(f"{key}={value}" for key, value in said.items() if value is not None),
            *options.set,
        ],
    )


def start_engine(
    shape: str, config: Config, world: World, folder: Path, cleanup: ExitStack
) -> SGLangEngine | None:
    """The replica's engine on its leader, asleep, with random weights that the first push replaces;
    None on other ranks."""
    if not world.replica.leads:
        return None
    model_folder = folder / f"config_{world.rank}"
    qwen2_config(shape).save_pretrained(model_folder)
    engine = SGLangEngine(
        str(model_folder),
        tp_size=world.replica.size,
        mem_fraction=config.engine.mem_fraction,
        attention_backend=config.engine.attention,
        dtype=config.model.dtype,
        context_length=config.rollout.max_game_tokens + 8,
        max_running_requests=config.engine.max_batch,
        seed=world.replica.index,
        device=world.device.type,
        base_gpu_id=world.local_rank,
        load_format="dummy",
    )
    cleanup.callback(engine.close)
    return engine


def make_learner(shape: str, config: Config, world: World) -> Learner:
    """The shape with random weights over the mesh, and its optimizer."""
    liger = config.model.liger and world.device.type == "cuda" and liger_is_here()
    model = random_model(
        shape,
        world,
        master=DTYPES[config.optim.master_dtype],
        liger=liger,
        checkpointing=config.parallel.checkpointing,
    )
    optimizer = make_optimizer(model, config.optim)
    return Learner(model, optimizer, world, DTYPES[config.model.dtype])


def with_drawn_rewards(episodes: Sequence[Episode], step: int) -> list[Episode]:
    """Every episode with a reward of its own, since random weights all earn the same nothing."""
    drawn = []
    for episode in episodes:
        seed = named_seed("reward", step, episode.instance, episode.index)
        earned = random.Random(seed).random()
        outcome = replace(episode.outcome, rewards=(earned,) * len(episode.transcripts))
        drawn.append(replace(episode, outcome=outcome))
    return drawn


def run_steps(
    options: argparse.Namespace,
    config: Config,
    learner: Learner,
    engine: Engine | None,
    folder: Path,
    peaks: Peaks,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The loop of train.py, one dict of seconds and counts a step; the first one warms up. Then the
    lone pushes."""
    world = learner.world
    rendering = make_rendering(make_tokenizer(config, folder, world))
    sampling = Sampling(temperature=config.rollout.temperature, stop_ids=rendering.stop_ids)
    offload = Offload(
        learner,
        state=config.parallel.offload_optimizer,
        reference=config.parallel.offload_reference,
        parameters=config.parallel.offload_parameters,
    )
    stream, limits = TrainStream(config), limits_of(config.rollout)
    sync_and_wake(learner, engine, offload, version=0, config=config.engine)
    watch, steps = Stopwatch(), []
    check = SyncCheck(learner, engine, config=config)
    for step in range(options.steps + 1):
        num = config.rollout.instances if step else max(world.replica.num, 1)
        with watch("play"), peaks("play"):
            instances = stream.step(step, world.replica.share(num))
            tables = self_play_games(
                instances,
                step=step,
                game=config.game,
                rollout=config.rollout,
                seed=config.seed,
                rendering=rendering,
            )
            episodes, played = play_games(tables, engine, sampling=sampling, limits=limits)
            barrier(world)
        check.listen(first_turns(episodes, NUM_TURNS))
        episodes = with_drawn_rewards(episodes, step)
        with watch("credit"):
            samples, credited = reward_samples(
                episodes, algorithm=config.algorithm, reward=config.reward
            )
            mine = share_by_tokens(samples, world)
        with watch("sleep"):
            sleep_engine(engine, offload, world)
        with watch("score"), peaks("update"):
            mine, scored = recompute_logprobs(learner, mine, settings=UpdateSettings.of(config))
            among = gather_objects(sample_statistics(mine, algorithm=config.algorithm), world)
            mine = assign_advantages(mine, algorithm=config.algorithm, everyone=among)
        with watch("update"), peaks("update"):
            learnt = scored | update_policy(
                learner, mine, [], step=step, settings=UpdateSettings.of(config)
            )
        with watch("push"), peaks("push"):
            sync_and_wake(learner, engine, offload, version=step + 1, config=config.engine)
        with watch("gate"):
            learnt |= check.after_push(version=step + 1)
        metrics = step_metrics(episodes, played, credited, learnt, world)
        steps.append({**metrics, "num_packed_tokens": num_packed(mine, world), **watch.lap()})
    return steps, lone_pushes(learner, engine, config, version=options.steps + 2)


def num_packed(samples: Sequence[object], world: World) -> float:
    """Tokens that the update read, over all ranks."""
    mine = sum(len(sample.ids) for sample in samples)  # type: ignore[attr-defined]
    return float(sum(gather_objects(mine, world)) // world.tp)


def summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the timed steps. Rank 0, whose stages are shown, leads an engine: a rank without
    one would count as credit what is its waiting for the games."""
    timed = steps[1:]
    found = {
        f"{stage}_s": statistics.median(step[f"{stage}_s"] for step in timed)
        for stage in (*STAGES, "step")
    }
    found["other_share"] = 1.0 - (found["play_s"] + found["update_s"]) / found["step_s"]
    for name in (
        "num_games",
        "num_generated_tokens",
        "num_packed_tokens",
        "mismatch_mean",
        "sync_check_mismatch",
    ):
        if name in timed[-1]:
            found[name] = timed[-1][name]
    found["generated_per_s"] = found["num_generated_tokens"] / found["play_s"]
    found["packed_per_s"] = found["num_packed_tokens"] / found["update_s"]
    return found


def measure(options: argparse.Namespace, world: World, cleanup: ExitStack) -> dict[str, object]:
    """One shape on this mesh."""
    place = cleanup.enter_context(tempfile.TemporaryDirectory())
    folder = Path(broadcast_object(place, world))
    config = settings(options, folder, world.world_size)
    row: dict[str, object] = {
        "shape": options.shape,
        "gpus": world.world_size,
        "mesh": f"fsdp {world.dp_size} x tp {world.tp}",
        "engines": f"{world.replica.num} x tp {world.replica.size}",
        "checkpointing": config.parallel.checkpointing,
        "masters": config.optim.master_dtype,
    }
    peaks = Peaks(world.device)
    if options.engine == "hf":
        learner = make_learner(options.shape, config, world)
        engine: Engine | None = HFEngine(learner.model, max_batch=config.engine.max_batch)
    else:
        engine = start_engine(options.shape, config, world, folder, cleanup)
        if engine is not None:
            row |= {f"start {part}": seconds for part, seconds in engine.start_s.items()}
        row |= {f"nap {name}": seconds for name, seconds in nap(engine, world).items()}
        peaks.look("engine asleep")
        learner = make_learner(options.shape, config, world)
    steps, pushes = run_steps(options, config, learner, engine, folder, peaks)
    row |= summary(steps) | pushes
    for phase in ("engine asleep", "play", "update", "push"):
        row[f"GiB {phase}"] = round(all_reduce_max(peaks.gib.get(phase, 0.0), world), 1)
    return row


def main() -> None:
    options = arguments()
    engine_tp = 1 if options.engine == "hf" else options.engine_tp or options.tp
    world = init_world(
        options.tp,
        options.fsdp,
        engine_tp=engine_tp,
        device="cpu" if options.dry_run else None,
    )
    with ExitStack() as cleanup:
        row = measure(options, world, cleanup)
        if world.rank == 0:
            shown = (f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items())
            print(" | ".join(shown), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        barrier(world)
    gc.collect()
    close_world(world)


if __name__ == "__main__":
    main()
