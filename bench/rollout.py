"""Measures two-seat games with turns of natural length against the same engine's plain batch.

Games have 10 alternating turns on real 8x8 prompts in the full style, shared by groups of 8.
Weights are random, so each turn's length is drawn from a geometric distribution and is the
request's limit. The ceiling is one batch with the same numbers of prompt and new tokens: a seat's
first prompt and observations as one prompt, its turns as one answer; the best of this and earlier
variants. As seats alternate, games have half of its requests at a time: a second ceiling is the
same batch of one seat of each game.
With --config the model's own stops end a turn, and the plain batch has the games' mean numbers.
Without a variant the engine has the settings that a run would choose (`auto`) if a turn may have
four times its mean. One engine serves all loads and the variants that differ only in its bursts.
Batches and games start with an empty prefix cache.
Requires a GPU and SGLang; with `--shape tiny --device cpu` the CPU engine.

    python -m bench.rollout                                         0.5B, 512 games, five means
    python -m bench.rollout --loads 256x45x3 2048x45                one engine, several sizes
    python -m bench.rollout --variants "" "burst_share=0.125" "processes=4; burst_share=0.125"
    python -m bench.rollout --config configs/smollm2_4x4.yaml       a real model with its own games

A variant is `key=value; …` of the section `engine`. Prints one JSON line per case: sampled tokens/s
and turns/s over the whole step, the ratio of the step and of its middle (20 to 60 % of the turns)
to the ceiling, the step's to the ceiling of one seat, the seconds after which 1, 20, 60, 80, 95 and
100 % of the turns had ended, the share of prompt tokens that were cached, and the load: CPU seconds
per second of each scheduler, of the driver (games, rendering) and of the front (SGLang's part of
the trainer's process), and the GPU's mean utilisation. bench.loop has the mismatch of its
log-probs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.rows import SHAPES, keep, need_sglang


def load(text: str) -> tuple[int, int, int]:
    """Games, mean tokens of a turn, and repeats (default 1)."""
    games, mean, *repeats = (int(number) for number in text.split("x"))
    if games < 8:
        raise argparse.ArgumentTypeError(f"a load must have 8 games or more, a group, got {text}")
    return games, mean, repeats[0] if repeats else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="0.5B")
    add("--config", help="a config with a real model, instead of a shape")
    add(
        "--loads",
        nargs="+",
        type=load,
        default=[load(f"512x{mean}") for mean in (10, 25, 45, 70, 150)],
        help="games x mean tokens a turn [x draws of lengths]; with --config the mean is not used",
    )
    add("--variants", nargs="+", default=[""], help="key=value; … of engine")
    add("--attention", default="auto")
    add("--mem-fraction", type=float, default=0.6)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--set", nargs="*", default=[], help="settings, key=value")
    add("--out", type=Path, help="append the JSON lines to this file, too")
    return parser.parse_args()


if __name__ == "__main__":  # --help and a mistake are answered before torch is imported
    arguments()

# isort: split
import torch

from bench import loop
from bench.shapes import qwen2_config, random_model
from bench.talks import GROUP, TURNS, Watched, talks
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.config import Config, load_config
from selfplay.data.stream import TrainStream
from selfplay.distributed import World, close_world, init_world
from selfplay.engines.base import Request, Sampling
from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.weights import Weights
from selfplay.errors import EngineFault
from selfplay.model.hub import local_folder
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Episode, GameSetup, Limits, limits_of
from selfplay.rollout.players import opening_ids
from selfplay.rollout.seating import self_play_games, whole_cast
from selfplay.setup import make_tokenizer
from selfplay.weight_sync.start import choose_engine, load_engine

ENDED = (1, 20, 60, 80, 95, 100)  # percent of the turns
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def busy(engine: SGLangEngine, watched: Watched) -> Iterator[dict[str, object]]:
    """Measures the CPU and GPU load inside the block and adds it to the yielded dict at its end."""
    pids = [process.pid for process in engine._loop.children if process.pid]
    figures: dict[str, object] = {}
    watcher = None
    if engine.device == "cuda":
        command = "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 500"
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        watcher = subprocess.Popen([*command.split(), "-i", gpu], stdout=subprocess.PIPE, text=True)
    before, start = [cpu_s(pid) for pid in pids], time.perf_counter()
    own = time.process_time()
    yield figures
    wall = time.perf_counter() - start
    used = sorted((cpu_s(pid) - b for pid, b in zip(pids, before, strict=True)), reverse=True)
    figures["schedulers_busy"] = [round(s / wall, 2) for s in used[: engine.num_ranks]]
    figures["front_busy"] = round((time.process_time() - own - watched.driver_s) / wall, 2)
    figures["driver_busy"] = round(watched.driver_s / wall, 2)
    if watcher is not None:
        watcher.terminate()
        samples = [float(line) for line in watcher.communicate()[0].split() if line.isdigit()]
        figures["gpu_busy"] = round(fmean(samples) / 100, 2) if samples else None


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def plain(engine: SGLangEngine, seats: int, prompt: int, heard: int, new: int, seed: int) -> float:
    """Sampled tokens/s of one batch: `seats` prompts of `prompt` tokens, shared by GROUP, and
    `heard` own tokens, with `new` sampled for each."""
    draws = random.Random(seed)

    def some(num: int) -> tuple[int, ...]:
        return tuple(draws.randrange(10, 7000) for _ in range(num))

    requests = []
    for group in range(seats // GROUP):
        shared = some(prompt)
        requests += [Request(shared + some(heard), new, group * GROUP + i) for i in range(GROUP)]
    engine.flush_cache("the plain batch")
    start = time.perf_counter()
    completions = engine.generate_batch(requests, Sampling(1.0, ()))
    return sum(len(c.ids) for c in completions) / (time.perf_counter() - start)


def ceilings(
    engine: SGLangEngine, seats: int, prompt: int, heard: int, new: int
) -> tuple[float, float]:
    """Sampled tokens/s of the plain batch, the better of two, and of one seat of each game."""
    one = max(GROUP, seats // 2 // GROUP * GROUP)
    every = [plain(engine, seats, prompt, heard, new, seed) for seed in range(2)]
    return max(every), plain(engine, one, prompt, heard, new, 2)


def shares(row: dict[str, Any], best: float, ceiling: float, one_seat: float) -> dict[str, Any]:
    """The plain batch's tokens/s, and a row's shares of the ceilings."""
    return {
        "plain_per_s": round(best),
        "ceiling_per_s": round(ceiling),
        "one_seat_per_s": round(one_seat),
        "share": round(row["tokens_per_s"] / ceiling, 3),
        "share_in_the_middle": round(row["middle_per_s"] / ceiling, 3),
        "share_of_one_seat": round(row["tokens_per_s"] / one_seat, 3),
    }


def seat_tokens(
    setups: Sequence[GameSetup], episodes: Sequence[Episode], rendering: Rendering
) -> tuple[int, int, int, int]:
    """How many seats spoke, a multiple of GROUP, and their mean numbers of tokens: the first
    prompt, heard after it, and sampled."""
    prompts, heard, new = [], [], []
    for setup, episode in zip(setups, episodes, strict=True):
        for seat, transcript in enumerate(episode.transcripts):
            if transcript is None or not any(transcript.mask):
                continue
            prompts.append(len(opening_ids(rendering, setup.game.prompt(seat))))
            heard.append(transcript.mask.count(0) - prompts[-1])
            new.append(sum(transcript.mask))
    seats = len(prompts) // GROUP * GROUP
    return seats, round(fmean(prompts)), round(fmean(heard)), round(fmean(new))


def own_games(config: Config, rendering: Rendering, games: int, repeat: int) -> list[GameSetup]:
    """Self-play games of the config, however many its steps have."""
    instances = games // config.rollout.group_size
    config = replace(config, rollout=replace(config.rollout, instances=instances))
    return self_play_games(
        TrainStream(config).step(repeat, range(instances)),
        step=repeat,
        game=config.game,
        rollout=config.rollout,
        seed=config.seed,
        cast=whole_cast(rendering, config.game),
    )


class Bench:
    """One run: a config, its rendering, and how engines are started."""

    def __init__(self, options: argparse.Namespace, folder: Path, world: World) -> None:
        self.options, self.folder, self.world = options, folder, world
        self.ceilings: dict[tuple[int, int], float] = {}
        self.most_games = max(games for games, _, _ in options.loads)
        self.model = None
        if options.config is None:
            self.model = random_model(
                options.shape, world, master=torch.bfloat16, liger=False, checkpointing="none"
            )
            qwen2_config(options.shape).save_pretrained(folder / "config")

    def config(self, words: Sequence[str], games: int, mean: int) -> tuple[Config, ChosenEngine]:
        """The settings for these games, and the engine that they choose."""
        config = self._settings(words, mean)
        size = config.rollout.group_size
        config = replace(config, rollout=replace(config.rollout, instances=max(1, games // size)))
        rewritten = self.rendering(config).rewritten
        config, chosen = choose_engine(
            config, self.weights(config), self.world, rewritten=rewritten
        )
        assert isinstance(chosen, ChosenEngine)
        return config, chosen

    def weights(self, config: Config) -> Path:
        path = config.model.path
        return self.folder / "config" if self.model is not None else local_folder(str(path))

    def _settings(self, words: Sequence[str], mean: int) -> Config:
        options = self.options
        common = [f"engine.{word}" for word in words] + options.set
        if options.config is not None:
            return load_config(
                options.config,
                [
                    f"out={self.folder}",
                    "engine.kind=sglang",
                    f"engine.attention={options.attention}",
                    f"engine.mem_fraction={options.mem_fraction}",
                    f"engine.max_batch={self.most_games}",
                    *common,
                ],
            )
        words = ["--shape", options.shape, "--attention", options.attention]
        words += ["--mem-fraction", str(options.mem_fraction), "--set"]
        natural = ["rollout.max_game_tokens=6000", f"rollout.max_new_tokens={4 * mean}"]
        base = loop.arguments([*words, *natural, *common])
        base.games = self.most_games
        return loop.settings(base, self.folder, 1)

    def rendering(self, config: Config) -> Rendering:
        return make_rendering(
            make_tokenizer(config, self.folder, self.world),
            template_kwargs=config.model.chat_template,
        )

    def start(self, config: Config, cleanup: ExitStack) -> SGLangEngine:
        load_format = "auto" if self.model is None else "dummy"
        engine = load_engine(
            config, self.weights(config), self.world, cleanup=cleanup, load_format=load_format
        )
        assert isinstance(engine, SGLangEngine)
        if self.model is not None:
            engine.load(Weights(self.model, engine.dtype), 1)
        return engine

    def rows(
        self,
        engine: SGLangEngine,
        config: Config,
        games: int,
        mean: int,
        repeats: int,
        variant: str,
    ) -> Iterator[dict[str, Any]]:
        rendering = self.rendering(config)
        if self.model is None:
            yield from self.own_rows(engine, config, rendering, games, repeats, variant)
            return
        with closing(TrainStream(config)) as stream:
            warmed = stream.step(99, range(max(1, games // 8 // GROUP)))
            cast = whole_cast(rendering, config.game)
            few = talks(warmed, config, cast, mean, 99)
            rounds = [
                talks(stream.step(repeat, range(games // GROUP)), config, cast, mean, repeat)
                for repeat in range(repeats)
            ]
        first = rounds[0][0].game.prompt(0)
        prompt = len(rendering.first(system=first.system, user=first.user))
        briefly = Watched(engine, mean)
        warm, _ = play_games(few, briefly, sampling=sampling_of(rendering), limits=LIMITS)
        own = [t.mask[prompt:] for e in warm for t in e.transcripts if t is not None]
        heard = round(fmean(mask.count(0) for mask in own))
        new = TURNS * mean // 2
        best, one_seat = ceilings(engine, 2 * games, prompt, heard, new)
        key = (games, mean)
        self.ceilings[key] = max(self.ceilings.get(key, 0.0), best)
        for setups in rounds:
            row, _ = self.measure(engine, config, rendering, setups, mean)
            yield {
                "shape": self.options.shape,
                "engine": variant,
                "processes": engine.num_processes,
                "burst_share": engine.bursts[0].share,
                **row,
                "heard_tokens": heard,
                **shares(row, best, self.ceilings[key], one_seat),
            }

    def own_rows(
        self,
        engine: SGLangEngine,
        config: Config,
        rendering: Rendering,
        games: int,
        repeats: int,
        variant: str,
    ) -> Iterator[dict[str, Any]]:
        """Rows of the config's own games, whose turns end by the model's own stops. Their plain
        batch has their mean numbers of tokens."""
        for repeat in range(repeats + 1):  # the first is a warm-up
            setups = own_games(config, rendering, games, repeat)
            row, episodes = self.measure(engine, config, rendering, setups, None)
            if not repeat:
                continue
            tokens = seat_tokens(setups, episodes, rendering)
            best, one_seat = ceilings(engine, *tokens)
            seats, prompt, heard, new = tokens
            yield {
                "config": self.options.config,
                "engine": variant,
                **row,
                "seats": seats,
                "prompt_tokens": prompt,
                "heard_tokens": heard,
                "new_tokens": new,
                **shares(row, best, best, one_seat),
            }

    def measure(
        self,
        engine: SGLangEngine,
        config: Config,
        rendering: Rendering,
        setups: Sequence[GameSetup],
        mean: int | None,
    ) -> tuple[dict[str, Any], Sequence[Episode]]:
        """Play the games; return the row of figures and the episodes."""
        watched = Watched(engine, mean)
        served = replace(engine.counters)
        limits = LIMITS if mean else limits_of(config.rollout)
        engine.flush_cache("the games")  # as in a step, which starts after a push
        start = time.perf_counter()
        with busy(engine, watched) as figures:
            episodes, stats = play_games(
                setups,
                watched,
                sampling=sampling_of(rendering),
                limits=limits,
            )
        ends = sorted(watched.ends)
        wall = ends[-1] - start
        per_turn = stats.num_generated_tokens / len(ends)
        middle = len(ends) * 2 // 5 / (ends[len(ends) * 3 // 5] - ends[len(ends) // 5])
        prompts = engine.counters.num_prompt_tokens - served.num_prompt_tokens
        row = {
            "games": len(setups),
            "mean_tokens": round(per_turn, 1),
            "step_s": round(wall, 2),
            "tokens_per_s": round(stats.num_generated_tokens / wall),
            "turns_per_s": round(len(ends) / wall),
            "middle_per_s": round(middle * per_turn),
            "ended_s": [round(ends[(len(ends) - 1) * q // 100] - start, 2) for q in ENDED],
            "cached": round(
                (engine.counters.num_cached_tokens - served.num_cached_tokens) / prompts, 3
            ),
            **figures,
        }
        return row, episodes


LIMITS = Limits(TURNS, max_retries=50)


def sampling_of(rendering: Rendering) -> Sampling:
    return Sampling(temperature=1.0, stop_ids=rendering.stop_ids)


def main() -> None:
    options = arguments()
    need_sglang("rollout")
    world = init_world(1, device="cpu" if options.device == "cpu" else None)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as last:
        bench = Bench(options, Path(folder), world)
        running, engine = None, None
        for variant, (games, mean, repeats) in product(options.variants, options.loads):
            words = [word.strip() for word in variant.split(";") if word.strip()]
            config, chosen = bench.config(words, games, mean)
            same = replace(chosen, burst_share=0.0, adapts=False)
            if engine is None or same != running:
                last.close()
                try:
                    engine, running = bench.start(config, last), same
                except (EngineFault, RuntimeError) as error:  # the other variants may still run
                    print(json.dumps({"engine": variant, "error": str(error)[-300:]}), flush=True)
                    engine = None
                    continue
            engine.adapt(chosen.burst_share, again=chosen.adapts)
            for row in bench.rows(engine, config, games, mean, repeats, variant):
                print(json.dumps(row), flush=True)
                keep(row, options.out)
    close_world(world)


if __name__ == "__main__":
    main()
