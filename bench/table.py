"""Runs `bench.loop` for several shapes and numbers of GPUs, and prints a table.

    python -m bench.table --gpus 1 2 4 --out runs/table       every shape on 1, 2 and 4 GPUs
    python -m bench.table --gpus 1 --shapes 0.5B 7B --games 64     --games is passed to bench.loop
    python -m bench.table --dry-run                           the tiny shape on the CPU

Each case is one run of `bench.loop`; they run one after another. On two or more GPUs, a 7B uses
tensor parallel 2 and one engine per two GPUs. The output of a case is in OUT/CASE.log. A case that
fails is named at the end and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows import SHAPES, STAGES

COLUMNS = (
    "shape | GPUs | mesh | engine up | sleep + wake | push | GiB: asleep, play, update, push | "
    f"step | {', '.join(STAGES)} | rest | sampled, packed tokens/s | mismatch"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One shape on a number of GPUs."""

    shape: str
    gpus: int

    @property
    def tp(self) -> int:
        return 2 if self.shape == "7B" and self.gpus > 1 else 1

    @property
    def name(self) -> str:
        return f"{self.shape}_on_{self.gpus}"

    def command(self, out: Path, more: Sequence[str]) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        loop = ["-m", "bench.loop", "--shape", self.shape, "--tp", str(self.tp), *more]
        rows = ["--out", str(out / f"{self.name}.json")]
        return [sys.executable, *(launch if self.gpus > 1 else []), *loop, *rows]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = [shape for shape in SHAPES if shape != "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--dry-run", action="store_true", help="the tiny shape on the CPU")
    chosen, more = parser.parse_known_args()
    chosen.loop = more
    if chosen.dry_run:
        chosen.shapes, chosen.gpus = ["tiny"], [1]
        chosen.loop = [*chosen.loop, "--dry-run"]
    return chosen


def succeeds(case: Case, options: argparse.Namespace) -> bool:
    """Run the case; False if it failed."""
    print(case.name, flush=True)
    with (options.out / f"{case.name}.log").open("wb") as log:
        words = case.command(options.out, options.loop)
        return subprocess.run(words, stdout=log, stderr=subprocess.STDOUT).returncode == 0


def table_line(row: dict[str, Any]) -> str:
    """A case's figures, in the order of `COLUMNS`."""

    def number(name: str, digits: int) -> str:
        return f"{row[name]:.{digits}f}" if name in row else "-"

    up_s = sum(seconds for name, seconds in row.items() if name.startswith("start "))
    nap_s = sum(seconds for name, seconds in row.items() if name.startswith("nap "))
    push = f"{number('lone_push_s', 3)} s, {number('lone_push_gib_per_s', 0)} GiB/s"
    memory = ", ".join(str(row[f"GiB {p}"]) for p in ("engine asleep", "play", "update", "push"))
    stages = ", ".join(number(f"{stage}_s", 3) for stage in STAGES)
    rates = f"{number('generated_per_s', 0)}, {number('packed_per_s', 0)}"
    cells = (
        row["shape"],
        row["gpus"],
        f"{row['mesh']}, engines {row['engines']}, {row['masters']} masters",
        f"{up_s:.0f} s",
        f"{nap_s:.3f} s",
        push,
        memory,
        f"{number('step_s', 2)} s",
        stages,
        f"{100 * row['other_share']:.1f} %",
        rates,
        number("mismatch_mean", 4),
    )
    return " | ".join(map(str, cells))


def main() -> None:
    options = arguments()
    import torch

    here = torch.cuda.device_count()
    if not options.dry_run and max(options.gpus) > here:
        sys.exit(f"--gpus must be at most {here}, the GPUs of this host, got {max(options.gpus)}")
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [Case(shape, gpus) for gpus in options.gpus for shape in options.shapes]
    for case in cases:  # remove rows of an earlier table, in case this case fails
        (options.out / f"{case.name}.json").unlink(missing_ok=True)
    failed = [case.name for case in cases if not succeeds(case, options)]
    print(f"\n| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}")
    for case in cases:
        rows = options.out / f"{case.name}.json"
        if rows.exists():
            print(f"| {table_line(json.loads(rows.read_text()))} |")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; each one's output is in {options.out}/NAME.log")


if __name__ == "__main__":
    main()
