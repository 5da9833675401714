"""Times a full training step at real sizes: engine start, seconds per stage, memory per phase.

    python -m bench.loop --shape 0.5B                                          one GPU
    torchrun --nproc-per-node 4 -m bench.loop --shape 7B --tp 2 --fsdp 2       a 2 x 2 mesh
    python -m bench.loop --shape 7B --config configs/qwen2.5_7b_lora.yaml      a shipped config
    python -m bench.loop --dry-run [--engine sglang]                           a tiny shape on a CPU

The stages are those of train.py, on 8x8 games in the full style. A policy with random weights never
ends a turn and never agrees. Each game is therefore a sequence of `--tries` refused moves of
`--turn-tokens` tokens by one seat, or with `--mean` ten turns of two seats whose lengths are drawn
from a geometric distribution; its reward is drawn at random. The first step is smaller and warms
up. The others are timed, and medians are reported. Memory is the sampled use of a GPU by all
processes, the maximum over GPUs. Seconds end in _s, sizes are in GiB.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.memory import Peaks, copy_ceiling, lone_pushes, nap
from bench.rows import keep, show
from bench.shapes import SHAPES, qwen2_config, random_model, save_random
from bench.talks import TURNS, Watched, talks
from selfplay import setup
from selfplay.chat.rendering import make_rendering
from selfplay.colocation.handover import sleep_engine
from selfplay.colocation.offload import Offload
from selfplay.colocation.restarts import Restarts
from selfplay.colocation.start import load_engine
from selfplay.colocation.sync_check import SyncCheck
from selfplay.config import Config, load_config
from selfplay.credit.advantages import compute_advantages, reward_samples
from selfplay.credit.sample import Sample
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
    on_first_rank,
)
from selfplay.engines.base import Engine, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.batch import balance_tokens
from selfplay.learner.learner import Learner, UpdateSettings
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.policy_update import update_policy
from selfplay.learner.recompute import recompute_logprobs
from selfplay.metrics.ending import Ending
from selfplay.metrics.step import step_metrics
from selfplay.metrics.step_log import Stopwatch
from selfplay.model.policy import DTYPES, liger_is_here
from selfplay.rollout.driver import first_turns, play_games
from selfplay.rollout.episode import Episode, Limits, limits_of
from selfplay.rollout.seating import self_play_games
from selfplay.setup import make_tokenizer

STAGES = ("play", "credit", "sleep", "logprobs", "advantages", "update", "push", "sync_check")
# Games per GPU, for a step of about 10 to 20 s.
GAMES = {"26M": 512, "0.5B": 512, "1.5B": 256, "7B": 96, "tiny": 4}
# Settings for a 7B on one GPU, from configs/qwen2.5_7b.yaml. The command line overrides them.
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
    parser.add_argument(
        "--config", type=Path, default=None, help="settings, adapters and reference of this file"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks of the update")
    parser.add_argument("--fsdp", type=int, default=None, help="FSDP ranks of the update")
    parser.add_argument("--engine-tp", type=int, default=None, help="default: same as --tp")
    parser.add_argument(
        "--games", type=int, default=None, help="games per GPU; default: depends on the shape"
    )
    parser.add_argument("--tries", type=int, default=4, help="refused moves per game")
    parser.add_argument("--turn-tokens", type=int, default=64, help="tokens sampled per move")
    parser.add_argument("--mean", type=int, help="mean tokens of a turn of natural length")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one for warm-up")
    parser.add_argument(
        "--mem-fraction", type=float, default=None, help="default: 0.3, or 0.25 for 7B on one GPU"
    )
    parser.add_argument("--attention", default="triton", help="the engine's attention backend")
    parser.add_argument(
        "--engine", choices=["sglang", "hf"], default=None, help="default: hf in a dry run"
    )
    parser.add_argument(
        "--checkpointing", default=None, help="none or full; default: full for 7B on one GPU"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="override any setting"
    )
    parser.add_argument("--out", type=Path, default=None, help="append one JSON line to this file")
    parser.add_argument("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shape, chosen.tries, chosen.turn_tokens, chosen.steps = "tiny", 2, 8, 1
        chosen.attention = "auto"
    chosen.engine = chosen.engine or ("hf" if chosen.dry_run else "sglang")
    chosen.games = chosen.games or GAMES[chosen.shape]
    return chosen


def settings(options: argparse.Namespace, folder: Path, num_ranks: int) -> Config:
    """A run's settings for this shape. `model.scratch` only affects the tokenizer."""
    lone_7b = options.shape == "7B" and num_ranks == 1
    group_size = min(8, options.games)
    engine_tp = options.engine_tp or options.tp
    optional = {
        "engine.mem_fraction": options.mem_fraction,
        "parallel.checkpointing": options.checkpointing,
    }
    own = ["engine.mem_fraction=0.3", f"parallel.tp={options.tp}", *(LONE_7B if lone_7b else [])]
    return load_config(
        options.config,
        [
            f"out={folder}",
            f"model.dtype={'float32' if options.dry_run else 'bfloat16'}",
            "model.path=null",
            "model.scratch={vocab_size: 8000, tokenizer_games: 40, max_positions: 8192}",
            "game.keep=all",
            "warm_start.keep=all",
            f"rollout.instances={max(1, options.games * num_ranks // group_size)}",
            f"rollout.group_size={group_size}",
            f"rollout.max_retries={options.tries - 1}",
            f"rollout.max_new_tokens={options.turn_tokens}",
            f"engine.kind={options.engine}",
            f"engine.max_batch={max(64, options.games * engine_tp)}",  # CUDA graphs only up to this
            f"engine.attention={options.attention}",
            f"engine.tp_size={engine_tp}",
            "engine.max_mismatch=0.5",  # random weights give large logits, imprecise in bf16
            *(own if options.config is None else []),
            *(f"{key}={value}" for key, value in optional.items() if value is not None),
            *options.set,
        ],
    )


def start_engine(
    shape: str, config: Config, world: World, folder: Path, cleanup: ExitStack
) -> SGLangEngine | None:
    """The replica's engine on its leader, awake, with random weights that the first push replaces.

    None on other ranks.
    """
    model_folder = folder / f"config_{world.rank}"
    qwen2_config(shape).save_pretrained(model_folder)
    engine = load_engine(config, model_folder, world, cleanup=cleanup, load_format="dummy")
    assert engine is None or isinstance(engine, SGLangEngine)
    return engine


def make_learner(
    options: argparse.Namespace, config: Config, world: World, *, folder: Path
) -> Learner:
    """A learner for the shape, with random weights on the mesh and an optimizer.

    With a shipped config it is made as a run makes it, with adapters and the reference, from random
    weights written to `folder`.
    """
    shape = options.shape
    if options.config is not None:
        weights = folder / "weights"
        on_first_rank(partial(save_random, shape, weights, world.device), world)
        return setup.make_learner(config, weights, world)
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
    """The episodes with random rewards. With random weights, all rewards would be 0 otherwise."""
    with_rewards = []
    for episode in episodes:
        seed = named_seed("reward", step, episode.instance, episode.index)
        reward = random.Random(seed).random()
        outcome = replace(episode.outcome, rewards=(reward,) * len(episode.transcripts))
        with_rewards.append(replace(episode, outcome=outcome))
    return with_rewards


def run_steps(
    options: argparse.Namespace,
    config: Config,
    learner: Learner,
    engine: Engine | None,
    folder: Path,
    peaks: Peaks,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Run the stages of train.py's loop, then time single pushes.

    Returns one dict of seconds and counts per step, the first of which is the warm-up, and the
    figures of the pushes.
    """
    world = learner.world
    rendering = make_rendering(make_tokenizer(config, folder, world))
    sampling = Sampling(temperature=config.rollout.temperature, stop_ids=rendering.stop_ids)
    offload = Offload(learner, config.parallel)
    stream, limits = TrainStream(config), limits_of(config.rollout)
    restarts = Restarts(learner, engine, offload, config=config.engine)
    restarts.push(0)
    update_settings = UpdateSettings.of(config)
    timed, steps = Stopwatch(), []
    check = SyncCheck(
        learner,
        engine,
        restarts,
        Ending(),
        config=config.engine,
        token_budget=config.optim.tokens_per_microbatch,
        offloaded=config.parallel.offload_parameters,
    )
    for step in range(options.steps + 1):
        num = config.rollout.instances if step else max(world.replica.num, 1)
        with timed("play"), peaks("play"):
            places, player = world.replica.share(num), engine
            if options.mean is None:
                setups = self_play_games(
                    stream.step(step, places),
                    step=step,
                    game=config.game,
                    rollout=config.rollout,
                    seed=config.seed,
                    rendering=rendering,
                )
            else:
                setups = talks(config, rendering, places, options.mean, step)
                if engine is not None:
                    player = Watched(engine, options.mean)  # type: ignore[abstract]
                    limits = Limits(TURNS, max_retries=50)
            episodes, rollout_stats = play_games(setups, player, sampling=sampling, limits=limits)
            barrier(world)
        check.before_update(first_turns(episodes, check.num_turns))
        episodes = with_drawn_rewards(episodes, step)
        with timed("credit"):
            samples, credit_stats = reward_samples(
                episodes, algorithm=config.algorithm, reward=config.reward
            )
            samples = balance_tokens(samples, world)
        with timed("sleep"):
            sleep_engine(engine, offload, world)
        with timed("logprobs"), peaks("update"):
            samples, metrics = recompute_logprobs(learner, samples, settings=update_settings)
        with timed("advantages"):
            samples, _ = compute_advantages(samples, {}, algorithm=config.algorithm, world=world)
        with timed("update"), peaks("update"):
            updated, _ = update_policy(learner, samples, [], step=step, settings=update_settings)
            metrics |= updated
        with timed("push"), peaks("push"):
            restarts.push(step + 1)
        with timed("sync_check"):
            metrics |= check.after_push(version=step + 1)
        metrics = step_metrics(episodes, rollout_stats, credit_stats, metrics, world)
        steps.append({**metrics, "num_packed_tokens": num_packed(samples, world), **timed.lap()})
    return steps, lone_pushes(learner, engine, config, version=options.steps + 2)


def num_packed(samples: Sequence[Sample], world: World) -> float:
    """The number of tokens that the update reads, over all ranks."""
    num_tokens = sum(len(sample.ids) for sample in samples)
    return float(sum(gather_objects(num_tokens, world)) // world.tp)


def summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the timed steps, on rank 0.

    Rank 0 leads an engine. A rank without one would count its wait for the games as credit.
    """
    timed = steps[1:]
    figures = {
        f"{stage}_s": statistics.median(step[f"{stage}_s"] for step in timed)
        for stage in (*STAGES, "step")
    }
    figures["other_share"] = 1.0 - (figures["play_s"] + figures["update_s"]) / figures["step_s"]
    for name in (
        "num_games",
        "num_generated_tokens",
        "num_packed_tokens",
        "mismatch_mean",
        "sync_check_mismatch",
    ):
        if name in timed[-1]:
            figures[name] = timed[-1][name]
    figures["generated_per_s"] = figures["num_generated_tokens"] / figures["play_s"]
    figures["packed_per_s"] = figures["num_packed_tokens"] / figures["update_s"]
    return figures


def measure(options: argparse.Namespace, world: World, cleanup: ExitStack) -> dict[str, object]:
    """The figures of one shape on this mesh."""
    temporary = cleanup.enter_context(tempfile.TemporaryDirectory())
    folder = Path(broadcast_object(temporary, world))
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
        learner = make_learner(options, config, world, folder=folder)
        engine: Engine | None = HFEngine(learner.model, max_batch=config.engine.max_batch)
    else:
        engine = start_engine(options.shape, config, world, folder, cleanup)
        if engine is not None:
            row |= {f"start {part}": seconds for part, seconds in engine.start_s.items()}
        row |= {f"nap {name}": seconds for name, seconds in nap(engine, world).items()}
        peaks.look("engine asleep")
        learner = make_learner(options, config, world, folder=folder)
    steps, pushes = run_steps(options, config, learner, engine, folder, peaks)
    row |= summary(steps) | pushes
    row["copy_gib_per_s"] = copy_ceiling(world.device)  # a push writes each byte twice
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
            show(row)
            keep(row, options.out)
        barrier(world)
    gc.collect()
    close_world(world)


if __name__ == "__main__":
    main()
