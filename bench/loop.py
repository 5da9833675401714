"""Times a full training step at real sizes: engine start, seconds per stage, memory per phase.

    python -m bench.loop --shape 0.5B                                          one GPU
    torchrun --nproc-per-node 4 -m bench.loop --shape 7B --tp 2 --fsdp 2       a 2 x 2 mesh
    python -m bench.loop --shape 7B --config configs/qwen2.5_7b_lora.yaml      a shipped config
    python -m bench.loop --shape 0.5B --engine vllm                            on the other engine
    python -m bench.loop --dry-run [--engine sglang]                           a tiny shape on a CPU

Runs the trainer's own steps, without its held-out games and checkpoints, from random weights on 8x8
games in the full style. A policy with random weights never ends a turn and never agrees. Each game
is therefore a sequence of `--tries` invalid moves of `--turn-tokens` tokens by one seat, or with
`--mean` ten turns of two seats whose lengths are drawn from a geometric distribution; its reward is
drawn at random. With several policies (`--set "policies={a: {seats: [0]}, b: {seats: [1]}}"`) each
plays its seats with its engine and updates. The first step is smaller and warms up. The others are
timed, and medians are reported. Memory is the sampled use of a GPU by all processes, the maximum
over GPUs; what is needed of it, without the freed memory that torch keeps, stands beside what
`train.py --dry-run` plans. Seconds end in _s, sizes are in GiB.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.rows import SHAPES, STAGES, count, keep, need_sglang, show

# Games per GPU, for a step of about 10 to 20 s.
GAMES = {"26M": 512, "0.5B": 512, "1.5B": 256, "7B": 96, "tiny": 4}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="0.5B")
    add("--config", type=Path, help="settings, adapters and reference of this file")
    add("--tp", type=int, default=1, help="tensor parallel ranks of the update")
    add("--fsdp", type=int, help="FSDP ranks of the update")
    add("--engine-tp", type=int, help="default: same as --tp")
    add("--games", type=count, help="games per GPU; default: depends on the shape")
    add("--tries", type=count, default=4, help="invalid moves per game")
    add("--turn-tokens", type=count, default=64, help="tokens sampled per move")
    add("--mean", type=count, help="mean tokens of a turn of natural length")
    add("--steps", type=count, default=2, help="timed steps, after one for warm-up")
    add("--mem-fraction", type=float, help="default: from --config, or 0.3")
    add("--attention", default="auto", help="the engine's attention backend")
    add("--engine", choices=["sglang", "vllm", "hf"], help="default: sglang, hf in a dry run")
    add("--set", nargs="*", default=[], metavar="key=value", help="override any setting")
    add("--out", type=Path, help="append one JSON line to this file")
    add("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    chosen = parser.parse_args(words)
    if chosen.dry_run:
        chosen.shape, chosen.tries, chosen.turn_tokens, chosen.steps = "tiny", 2, 8, 1
    chosen.engine = chosen.engine or ("hf" if chosen.dry_run else "sglang")
    if chosen.mean and chosen.engine == "hf":
        parser.error("--mean needs another engine: the hf engine's games end a turn together")
    if chosen.engine == "sglang":
        need_sglang("loop", "; --dry-run measures a tiny shape without it")
    if chosen.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        parser.error("--engine vllm needs vLLM, which is not installed (docs/engines.md)")
    chosen.games = chosen.games or GAMES[chosen.shape]
    return chosen


if __name__ == "__main__":  # --help and a mistake are answered before torch is imported
    arguments()

# isort: split
import torch

from bench.shapes import save_random
from bench.talks import TURNS, Watched, talks
from bench.update import GIB, matmul_peak, operations
from selfplay import setup
from selfplay import step as one_step
from selfplay.advantages.sample import Sample
from selfplay.apps.plan.dry_run import model_shape
from selfplay.apps.plan.memory import Demand, estimate_policies, gpu_gib
from selfplay.config import Config, load_config
from selfplay.data.seeds import named_seed
from selfplay.distributed import (
    World,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_object,
    close_world,
    gather_objects,
    init_world,
    on_first_rank,
)
from selfplay.engines.base import Engine, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.batch import micro_batches
from selfplay.learner.learner import Learner
from selfplay.learner.update import update_policy
from selfplay.metrics.step import add_up
from selfplay.metrics.step_log import Stopwatch
from selfplay.preflight.run import described_model
from selfplay.rollout.driver import Rollout, play_games
from selfplay.rollout.episode import Episode, Limits
from selfplay.setup import make_tokenizer
from selfplay.step import ending
from selfplay.step import play as play_instances
from selfplay.step.run import Run

PHASES = ("play", "update", "push")
SCRATCH = [
    "model.path=null",
    "model.scratch={vocab_size: 8000, tokenizer_games: 40, max_positions: 8192}",
]


def settings(
    options: argparse.Namespace, folder: Path, num_ranks: int, weights: Path | None = None
) -> Config:
    """A run's settings for this shape in `folder`, from `weights`. Without them `model.scratch`
    makes the tokenizer."""
    group_size = min(8, options.games)
    engine_tp = options.engine_tp or options.tp
    own = ["engine.mem_fraction=0.3", f"parallel.tp={options.tp}"]
    return load_config(
        options.config,
        [
            f"out={folder}",
            *(
                ["model.dtype=float32", "optim.master_dtype=float32"]
                if options.dry_run
                else ["model.dtype=bfloat16"]
            ),
            *(SCRATCH if weights is None else [f"model.path={weights}", "model.scratch=null"]),
            f"steps={options.steps + 1}",
            "warm_start.num_games=0",
            "game.options.keep=all",
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
            *([f"engine.mem_fraction={options.mem_fraction}"] if options.mem_fraction else []),
            *options.set,
        ],
    )


def with_drawn_rewards(episodes: Sequence[Episode], step: int) -> list[Episode]:
    """The episodes with random rewards. With random weights, all rewards would be 0 otherwise."""
    with_rewards = []
    for episode in episodes:
        seed = named_seed("reward", step, episode.instance, episode.index)
        reward = random.Random(seed).random()
        outcome = replace(episode.outcome, rewards=(reward,) * len(episode.transcripts))
        with_rewards.append(replace(episode, outcome=outcome, paid=None))
    return with_rewards


class Peaks:
    """The peak GPU memory of each phase in GiB, sampled by a thread every 10 ms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gib: dict[str, float] = {}

    def look(self, phase: str) -> None:
        if self._device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            own = torch.cuda.memory_stats(self._device)
            kept = own["reserved_bytes.all.current"] - own["allocated_bytes.all.current"]
            if reserved != own["reserved_bytes.all.current"]:
                return  # `free` is of another moment
            for name, unused in ((phase, free), (f"{phase} needed", free + kept)):
                self.gib[name] = max(self.gib.get(name, 0.0), (total - unused) / GIB)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                self.look(phase)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.look(phase)
            done.set()
            thread.join()


class Timed(Stopwatch):
    """The loop's stopwatch, which also samples the memory of PHASES."""

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()
        self._peaks = peaks

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        memory = self._peaks(stage) if stage in PHASES else nullcontext()
        with super().__call__(stage), memory:
            yield


def play_drawn(mean: int | None, run: Run, step: int, numbers: Sequence[int]) -> Rollout:
    """Replaces `play`: games that random weights can play, with random rewards.

    The first step, a warm-up, plays one instance per rank.
    """
    numbers = numbers if step else numbers[:1]
    if mean is None:
        rollout = play_instances(run, step, numbers)
        episodes, stats = rollout.episodes, rollout.stats
    else:
        first = run.policies[0]
        with run.timed("play"):
            instances = run.stream.step(step, numbers)
            episodes, stats = play_games(
                talks(instances, run.config, run.cast, mean, step),
                Watched(first.engine, mean),
                sampling=Sampling(run.config.rollout.temperature, first.rendering.stop_ids),
                limits=Limits(TURNS, max_retries=50),
                versions={seated.model: step for seated in run.cast},
            )
            barrier(run.world)
    return Rollout(with_drawn_rewards(episodes, step), stats)


def run_steps(
    config: Config,
    world: World,
    cleanup: ExitStack,
    *,
    mean: int | None,
    peaks: Peaks,
    shape: str,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Take the steps of a run with the bench's games, without its held-out games and checkpoints.

    Returns the metrics and seconds of each step (rank 0), the first of which is the warm-up, and
    the seconds of the engine's start and the work of an update.
    """
    alone: dict[str, float] = {}
    last: dict[int, list[Sample]] = {}  # of the last step, by learner

    def nothing(*_parts: Any, **_settings: Any) -> None: ...

    def sleep_alone(engine: Engine | None) -> None:
        if isinstance(engine, SGLangEngine):
            for part, seconds in engine.start_s.items():
                alone[f"start {part}"] = alone.get(f"start {part}", 0.0) + seconds
        if engine is not None:
            engine.sleep()
        barrier(world)
        peaks.gib.clear()  # another policy's engine may still have been awake
        peaks.look("engine asleep")

    def update(learner: Learner, samples: list[Sample], *others: Any, **named: Any) -> Any:
        metrics, skipped = update_policy(learner, samples, *others, **named)
        last[id(learner)] = samples
        num_tokens = sum(sample.num_read for sample in samples)
        num_packed = float(sum(gather_objects(num_tokens, world)) // world.tp)
        return metrics | {"num_packed_tokens": num_packed}, skipped

    with (
        patch.multiple(
            setup,
            sleep_or_close=sleep_alone,
            held_out_at_start=nothing,
            Stopwatch=partial(Timed, peaks),
        ),
        patch.multiple(
            one_step,
            play=partial(play_drawn, mean),
            update_policy=update,
        ),
        patch.object(ending, "save_learner", nothing),
    ):
        run = setup.set_up(config, world, cleanup)
        for step in range(run.first_step, config.steps):
            one_step.take_step(run, step)
        run.journal.close()
    works = [update_work(samples, config, world, shape=shape) for samples in last.values()]
    alone |= add_up(works) | {"peak_operations": max(work["peak_operations"] for work in works)}
    if world.rank:
        return [], alone
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], alone


def update_work(
    samples: Sequence[Sample], config: Config, world: World, *, shape: str
) -> dict[str, float]:
    """The computed tokens of an update of these samples, its operations (with the reference's
    forward pass), and the operations that the GPUs could do in a second. Sums over all ranks."""
    optim = config.optim
    packed = micro_batches(
        samples,
        replace(world, device=torch.device("cpu")),
        budget=optim.tokens_per_microbatch,
        share_prefixes=optim.share_prefixes,
    )
    batches = [batch for indices, batch in packed if indices]
    # A forward pass is a third of the work; adapters leave out the gradients of the other weights.
    thirds = (2.0 if config.model.lora else 3.0) + (1.0 if config.algorithm.kl else 0.0)
    work = operations(shape, batches) * thirds / 3.0
    tokens = float(sum(len(batch.row.ids_N) for batch in batches))
    names = ("num_computed_tokens", "update_operations", "peak_operations")
    # The ranks of a tensor-parallel row have the same samples, and each does a part of the work.
    own = [tokens / world.tp, work / world.tp, matmul_peak(world.device)]
    return dict(zip(names, all_reduce_sum(own, world), strict=True))


def _sum(step: dict[str, float], name: str) -> float:
    """A metric over all policies, whose names follow a slash."""
    return sum(value for key, value in step.items() if key.partition("/")[0] == name)


def summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the timed steps, on rank 0.

    Rank 0 drives an engine. A rank without one would count its wait for the games as credit time.
    """
    timed = steps[1:]
    figures = {
        f"{stage}_s": statistics.median(step[f"{stage}_s"] for step in timed)
        for stage in (*STAGES, "step")
    }
    figures["other_share"] = statistics.median(
        1.0 - (step["play_s"] + step["update_s"]) / step["step_s"] for step in timed
    )
    shown = (
        *("num_games", "num_generated_tokens", "num_packed_tokens"),
        *("mismatch_mean", "sync_check_mismatch", "num_engine_restarts"),
    )
    figures |= {n: value for n, value in timed[-1].items() if n.partition("/")[0] in shown}
    for name, tokens, stage in (
        ("generated_per_s", "num_generated_tokens", "play_s"),
        ("packed_per_s", "num_packed_tokens", "update_s"),
    ):
        figures[name] = statistics.median(_sum(step, tokens) / step[stage] for step in timed)
    return figures


def planned_gib(config: Config, device: torch.device) -> dict[str, float]:
    """What `train.py --dry-run` says is needed of this GPU, or of one of 80 GB, by phase."""
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory / GIB if on_gpu else gpu_gib(80)
    demands = {}
    for name in config.policy_names:
        own = config.of_policy(name)
        shape = model_shape(described_model(own.model), own.model.lora)
        demands[name] = Demand.of(own, shape, total=total)
    needed = estimate_policies(demands).needed()
    return {f"GiB {phase.strip('/')} planned": gib for phase, gib in needed.items()}


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
    weights = folder / "weights"
    tokenizer = make_tokenizer(config, folder, world)
    on_first_rank(partial(save_random, options.shape, weights, world.device), world)
    on_first_rank(partial(tokenizer.save_pretrained, weights), world)
    config = settings(options, folder / "run", world.world_size, weights)
    steps, alone = run_steps(
        config, world, cleanup, mean=options.mean, peaks=peaks, shape=options.shape
    )
    row |= alone
    if world.rank == 0:
        row |= summary(steps)
        could = alone["peak_operations"] * summary(steps)["update_s"]
        row["update_utilisation"] = alone["update_operations"] / could
    for phase in ("engine asleep", *PHASES, "play needed", "update needed"):
        row[f"GiB {phase}"] = round(all_reduce_max(peaks.gib.get(phase, 0.0), world), 1)
    return row | {name: round(gib, 1) for name, gib in planned_gib(config, world.device).items()}


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
