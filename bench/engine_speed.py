"""Measures tokens per second of the SGLang engine, and the cost of its deterministic mode.

    python -m bench.engine_speed --shape 0.5B                        one GPU, both modes
    python -m bench.engine_speed --shape 7B --attention fa3 triton   compare two backends
    python -m bench.engine_speed --dry-run                           a tiny shape, SGLang on a CPU

The load is like a rollout: `--games` concurrent games, each of which requests one turn after the
other on a growing prompt, so that prefixes are reused. Weights are random, so every turn has its
full length. The first pass warms up; seconds are the median of the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from bench.rows import keep, show
from bench.shapes import SHAPES, qwen2_config, random_model
from selfplay.colocation import weight_sync as sync
from selfplay.distributed import World, close_world, init_world
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine

Ask = Callable[[Request], Awaitable[Completion]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--attention", nargs="+", default=["triton"])
    parser.add_argument("--deterministic", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--games", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=500, help="before the first turn")
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=3, help="timed passes, after one for warm-up")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines to this file")
    parser.add_argument("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shape, chosen.games, chosen.turns, chosen.passes = "tiny", 4, 2, 1
        chosen.prompt_tokens, chosen.turn_tokens = 20, 8
        chosen.attention, chosen.deterministic = ["torch_native"], ["off"]  # all a CPU supports
    return chosen


def game(options: argparse.Namespace, index: int) -> Callable[[Ask], Awaitable[int]]:
    """A game that plays its turns, each with its own seed, and returns the number of tokens
    sampled."""
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(10, 500, (options.prompt_tokens,), generator=generator).tolist()

    async def play(ask: Ask) -> int:
        ids, num_sampled = list(prompt), 0
        for turn in range(options.turns):
            completion = await ask(Request(tuple(ids), options.turn_tokens, 1000 * index + turn))
            ids += [*completion.ids, *prompt[:16]]  # the latter stand for the other seat's turn
            num_sampled += len(completion.ids)
        return num_sampled

    return play


def measure(
    options: argparse.Namespace, world: World, folder: str, *, attention: str, deterministic: bool
) -> dict[str, object]:
    """The figures of one engine under the load."""
    on_cpu = world.device.type == "cpu"
    engine = SGLangEngine(
        folder,
        mem_fraction=0.5,
        attention_backend=attention,
        dtype="float32" if on_cpu else "bfloat16",
        max_total_tokens=8192 if on_cpu else None,
        max_running_requests=options.games,
        deterministic=deterministic,
        device=world.device.type,
        load_format="dummy",
    )
    try:
        model = random_model(
            options.shape, world, master=torch.float32, liger=False, checkpointing="none"
        )
        sync.push(model, engine, version=1, dtype=engine.dtype)
        del model
        seconds = []
        for _ in range(options.passes + 1):
            began_s = time.perf_counter()
            tasks = [game(options, index) for index in range(options.games)]
            num_sampled = sum(engine.stream(tasks, Sampling(1.0, ())))
            seconds.append(time.perf_counter() - began_s)
        served = engine.served
    finally:
        engine.close()
    return {
        "shape": options.shape,
        "attention": attention,
        "deterministic": deterministic,
        "first_pass_s": seconds[0],
        "pass_s": statistics.median(seconds[1:]),
        "sampled": num_sampled,
        "sampled_per_s": num_sampled / statistics.median(seconds[1:]),
        "prompt_reused": served.num_cached_tokens / served.num_prompt_tokens,
    }


def main() -> None:
    options = arguments()
    world = init_world(device="cpu" if options.dry_run else None)
    with tempfile.TemporaryDirectory() as folder:
        qwen2_config(options.shape).save_pretrained(folder)
        for attention in options.attention:
            for mode in options.deterministic:
                row = measure(
                    options, world, folder, attention=attention, deterministic=mode == "on"
                )
                show(row)
                keep(row, options.out)
    close_world(world)


if __name__ == "__main__":
    main()
