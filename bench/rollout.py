"""Measures two-seat games with turns of natural length against the same engine's plain batch.

Games of 10 alternating turns on real 8x8 prompts in full words, shared by groups of 8. Weights are
random; a turn ends by one of many stop tokens, so its length is geometric. The ceiling is one batch
of the engine with as many prompts of that length, in the same run. Requires a GPU and SGLang.

    python -m bench.rollout                                  0.5B, 512 games, three mean lengths
    python -m bench.rollout --set 'engine.server_args={enable_mixed_chunk: true}'

Prints a JSON line a case: sampled tokens/s, turns/s, shares of the ceiling over the whole step and
in its middle (from 20 to 60 % of the turns), cached prompt tokens, and how busy the scheduler's
process, the trainer's process and the GPU are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench import loop
from bench.shapes import SHAPES, random_model
from dialop.game import Game, Outcome, Prompt, Step
from selfplay.chat.rendering import make_rendering
from selfplay.colocation.weight_sync import push
from selfplay.config import Config
from selfplay.data.stream import TrainStream
from selfplay.distributed import World, close_world, init_world
from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.games import kit_of
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import GameSetup, Limits
from selfplay.rollout.players import PolicyPlayer
from selfplay.setup import make_tokenizer

TURNS, GROUP, FIRST_STOP = 10, 8, 50_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Talk(Game):
    """Every text is a message to the other seat; over after TURNS turns. `ends` notes the times."""

    num_seats = 2

    def __init__(self, inner: Game, ends: list[float]) -> None:
        self._inner, self._ends, self._num = inner, ends, 0

    @property
    def seat_to_move(self) -> int | None:
        return None if self._num >= TURNS else self._num % 2

    def prompt(self, seat: int) -> Prompt:
        return self._inner.prompt(seat)

    def step(self, seat: int, text: str) -> Step:
        self._num += 1
        self._ends.append(time.perf_counter())
        observations = ["", ""]
        observations[1 - seat] = f"Partner: {text[:200]}"
        return Step(seat, "message", None, None, tuple(observations))

    def clone(self) -> Game:
        twin = Talk(self._inner, self._ends)
        twin._num = self._num
        return twin

    def view(self, seat: int) -> None:
        return None

    def outcome(self) -> Outcome:
        return Outcome(self._num >= TURNS, False, 0.0, 0.0, (0.0, 0.0), {})

    def state(self) -> dict[str, Any]:
        return {}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--games", nargs="+", type=int, default=[512])
    parser.add_argument("--means", nargs="+", type=int, default=[10, 45, 150], help="tokens a turn")
    parser.add_argument("--bursts", nargs="+", type=float, default=[0.0], help="engine.burst_share")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--mem-fraction", type=float, default=0.6)
    parser.add_argument("--set", nargs="*", default=[], help="settings, key=value")
    return parser.parse_args()


@contextmanager
def busy(engine: SGLangEngine) -> Iterator[dict[str, float]]:
    """Fills the dict with CPU seconds per second of the trainer's process and of the engine's
    busiest child, and the GPU's mean utilisation."""
    pids = [process.pid for process in engine._loop.processes if process.pid]
    figures: dict[str, float] = {}
    command = "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 200 -i 0"
    watcher = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
    before, start = [cpu_s(pid) for pid in pids], time.perf_counter()
    own = time.process_time()
    yield figures
    wall = time.perf_counter() - start
    watcher.terminate()
    samples = [float(line) for line in watcher.communicate()[0].split() if line.isdigit()]
    used = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    figures["scheduler_busy"] = max(used) / wall
    figures["trainer_busy"] = (time.process_time() - own) / wall
    figures["gpu_busy"] = fmean(samples) / 100 if samples else float("nan")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def plain(engine: SGLangEngine, games: int, prompt: int, new: int, seed: int) -> float:
    """Sampled tokens/s of one batch: `games` prompts of `prompt` tokens, `new` sampled for each."""
    draws = random.Random(seed)
    requests = []
    for group in range(games // GROUP):
        ids = tuple(draws.randrange(10, 7000) for _ in range(prompt))
        requests += [Request(ids, new, group * GROUP + i) for i in range(GROUP)]
    start = time.perf_counter()
    completions = engine.generate(requests, Sampling(1.0, ()))
    return sum(len(c.ids) for c in completions) / (time.perf_counter() - start)


def main() -> None:
    options = arguments()
    argv = ["loop", "--shape", options.shape, "--attention", options.attention]
    sys.argv = [*argv, "--mem-fraction", str(options.mem_fraction), "--set"]
    sys.argv += ["rollout.max_game_tokens=6000", *options.set]
    base = loop.arguments()
    base.games = max(options.games)
    world = init_world(1)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        config = loop.settings(base, folder, 1)
        engine = loop.start_engine(options.shape, config, world, folder, cleanup)
        assert engine is not None
        model = random_model(
            options.shape, world, master=torch.bfloat16, liger=False, checkpointing="none"
        )
        push(model, engine, version=1, dtype=engine.dtype)
        del model
        for mean in options.means:
            for games in options.games:
                for row in cases(engine, config, folder, world, games, mean, options):
                    print(json.dumps(row), flush=True)
    close_world(world)


def cases(
    engine: SGLangEngine,
    config: Config,
    folder: Path,
    world: World,
    games: int,
    mean: int,
    options: argparse.Namespace,
) -> Iterator[dict[str, object]]:
    rendering = make_rendering(make_tokenizer(config, folder, world))
    vocab = SHAPES[options.shape][5]
    stops = range(FIRST_STOP, FIRST_STOP + vocab // mean)
    sampling = Sampling(temperature=1.0, stop_ids=(*rendering.stop_ids, *stops))
    kit = kit_of(config.game)
    instances = TrainStream(config).step(0, range(games // GROUP))
    first = kit.new_game(instances[0], config.game).prompt(0)
    prompt = len(rendering.first(system=first.system, user=first.user))
    ceiling = max(plain(engine, games, prompt, TURNS * mean // 2, seed) for seed in range(2))
    for share in options.bursts:
        engine.bursts.share = share
        for repeat in range(options.repeats + 1):  # the first one warms up
            ends: list[float] = []
            setups = [
                GameSetup(
                    Talk(kit.new_game(instance, config.game), ends),
                    tuple(
                        PolicyPlayer(
                            rendering,
                            seed_names=(repeat, instance.key, i, seat),
                            max_new_tokens=4 * mean,
                            max_game_tokens=config.rollout.max_game_tokens,
                        )
                        for seat in (0, 1)
                    ),
                    instance.key,
                    i,
                )
                for instance in instances
                for i in range(GROUP)
            ]
            served, start = dataclasses.replace(engine.served), time.perf_counter()
            with busy(engine) as figures:
                _, stats = play_games(
                    setups, engine, sampling=sampling, limits=Limits(TURNS, max_retries=50)
                )
            if not repeat:
                continue
            wall = max(ends) - start
            low, high = sorted(ends)[len(ends) // 5], sorted(ends)[3 * len(ends) // 5]
            per_turn = stats.num_generated_tokens / stats.num_turns
            middle = 0.4 * len(ends) / (high - low) * per_turn
            cached = engine.served.num_cached_tokens - served.num_cached_tokens
            prompts = engine.served.num_prompt_tokens - served.num_prompt_tokens
            yield {
                "shape": options.shape,
                "games": games,
                "mean_tokens": round(per_turn, 1),
                "burst_share": share,
                "tokens_per_s": round(stats.num_generated_tokens / wall),
                "turns_per_s": round(stats.num_turns / wall),
                "ceiling_tokens_per_s": round(ceiling),
                "share": round(stats.num_generated_tokens / wall / ceiling, 3),
                "share_in_the_middle": round(middle / ceiling, 3),
                "cached": round(cached / prompts, 3),
                **{name: round(value, 2) for name, value in figures.items()},
            }


if __name__ == "__main__":
    main()
