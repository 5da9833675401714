"""How long a long run's page takes to draw, and how large it is.

    OMP_NUM_THREADS=1 python -m bench.page [--steps 4000] [--games 5000]

Makes a run folder of scripted 8x8 games with the log-probs of their words, and draws its page three
times, in processes of their own as the observer does. Prints the seconds of each processor.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
from pathlib import Path

from bench.rows import count
from selfplay.apps.report import REPORT, refresh_report
from tests.helpers.run_folders import make_run, step_line, write_lines

NUM_METRICS = 50  # besides those of `step_line`
NUM_DRAWN = 3


def long_run(folder: Path, *, steps: int, games: int) -> Path:
    """A run of this many steps, with this many logged games."""
    draw = random.Random(0)
    make_run(folder, f"steps={steps}", "game.options.size=8", num_games=64)
    more = [f"metric_{number}" for number in range(NUM_METRICS)]
    numbers = [{name: draw.random() for name in more} for _ in range(steps)]
    write_lines(
        folder / "metrics.jsonl", [step_line(n) | own for n, own in enumerate(numbers, start=1)]
    )
    lines = (folder / "games.jsonl").read_text().splitlines()
    with (folder / "games.jsonl").open("w") as file:
        for number in range(games):
            game = json.loads(lines[number % len(lines)])
            for turn in game["turns"]:
                turn["tokens"] = [[f"{w} ", round(-draw.random(), 3)] for w in turn["text"].split()]
            game |= {"step": 1 + number * steps // games, "instance": f"instance {number}"}
            file.write(json.dumps(game) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=count, default=4000)
    parser.add_argument("--games", type=count, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder, seconds = long_run(Path(home) / "run", **vars(args)), []
        for _ in range(NUM_DRAWN):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            refresh_report(folder, rank=0)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        sizes = {name: (folder / name).stat().st_size / 1e6 for name in ("games.jsonl", REPORT)}
        drawn = ", ".join(f"{one:.1f}" for one in seconds)
        print(f"drawn in {drawn} s; " + ", ".join(f"{n} {mb:.1f} MB" for n, mb in sizes.items()))


if __name__ == "__main__":
    main()
