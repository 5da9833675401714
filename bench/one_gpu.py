"""The one-GPU rows of docs/performance.md, of one commit, each printed as it is measured.

    python -m bench.one_gpu                              all parts, about 25 minutes
    python -m bench.one_gpu --parts 0.5B "7B adapters"   these
    python -m bench.one_gpu --dry-run                    tiny shapes on a CPU: the words, no figures

Each part is another bench in a process of its own (PARTS), whose output goes to `--logs`. It is
ended at its limit, and a part that fails is a row with its last line. The first part pays for the
kernels that a new machine compiles. The GPU must be free, and other GPUs of the host idle: the head
says what else uses them. MFU is a share of the data sheet's 989 TFLOP/s of a Hopper GPU in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows import last_line

DATA_SHEET = 989e12  # operations per second in bf16 of an H100 or an H200
TURNS = 10  # of a game of bench.loop with --mean
LOOP = ("loop", "--mean", "45", "--shape")
PEERS = ("peers", "--shapes")
FLASH = "flash_attention_4"


@dataclass(frozen=True, slots=True)
class Part:
    """A bench with its words and the most seconds that it may take."""

    limit_s: int
    words: tuple[str, ...]

    def command(self, out: Path, *, dry: bool) -> list[str]:
        bench, *words = self.words
        if dry:  # on a CPU a game's turns have one length, and TRL its own ways
            if "--mean" in words:
                at = words.index("--mean")
                words[at : at + 2] = []
            if "--ways" in words:
                words[words.index("--ways") :] = []
            words.append("--dry-run")
        return [sys.executable, "-m", f"bench.{bench}", *words, "--out", str(out)]


TWO = "policies={a: {seats: [0]}, b: {seats: [1]}}"
PARTS = {
    "0.5B": Part(300, (*LOOP, "0.5B", "--config", "configs/qwen2.5_0.5b.yaml")),
    "1.5B": Part(240, (*LOOP, "1.5B", "--config", "configs/qwen2.5_1.5b.yaml")),
    "7B adapters": Part(300, (*LOOP, "7B", "--config", "configs/qwen2.5_7b_lora.yaml")),
    "7B": Part(330, (*LOOP, "7B", "--config", "configs/qwen2.5_7b_1gpu.yaml")),
    "two policies": Part(
        240, (*LOOP, "0.5B", "--config", "configs/qwen2.5_0.5b.yaml", "--set", TWO)
    ),
    "TRL 0.5B": Part(300, (*PEERS, "0.5B", "--batches", "8", "16", "32")),
    "TRL 7B": Part(
        360,
        (*PEERS, "7B", "--steps", "1", "--batches", "8", "--ways", FLASH, f"{FLASH}:async"),
    ),
    "TRL whole": Part(
        300,
        (*PEERS, "0.5B", "--whole", "--steps", "1", "--batches", "16", "--ways", "sdpa:eager"),
    ),
}
HEAD = (
    "| part | games a step | seconds a step: play, update | turns/s in play | utilisation | MFU |"
    " measured TFLOP/s | took s |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ", ".join(PARTS)
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=names)
    add("--logs", type=Path, help="keep the parts' output and JSON lines in this folder")
    add("--dry-run", action="store_true")
    return parser.parse_args(words)


def said(*command: str) -> str:
    """What a command prints, "-" where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "-"
    return "; ".join(done.stdout.split("\n")).strip("; ") or "-"


def table_row(name: str, rows: Sequence[dict[str, Any]], took_s: float) -> str:
    """The table's line of a part: the figures of bench.loop, or the comparisons of bench.peers."""
    row = rows[-1]
    if "step_s" not in row:
        told = [f"{key} {value}" for r in rows for key, value in r.items() if "times_as" in key]
        return f"| {name} | {', '.join(told)} | | | | | | {took_s:.0f} |"
    utilisation, peak = float(row["update_utilisation"]), float(row["peak_operations"])
    seconds = f"{row['step_s']:.1f}: {row['play_s']:.1f}, {row['update_s']:.1f}"
    turns = float(row["num_games"]) * TURNS / float(row["play_s"])
    return (
        f"| {name} | {row['num_games']:.0f} | {seconds} | {turns:.0f} | {utilisation:.2f} | "
        f"{utilisation * peak / DATA_SHEET:.2f} | {peak / 1e12:.0f} | {took_s:.0f} |"
    )


def measure(name: str, logs: Path, *, dry: bool) -> str | None:
    """Run a part and print its line; returns why it failed."""
    part, began_s = PARTS[name], time.perf_counter()
    out, log = (logs / f"{name.replace(' ', '_')}.{end}" for end in ("jsonl", "log"))
    out.unlink(missing_ok=True)
    with log.open("w") as file:
        try:
            command = part.command(out, dry=dry)
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=part.limit_s, check=False
            ).returncode
            why = None if status == 0 else f"exit status {status}: {last_line(log.read_text())}"
        except subprocess.TimeoutExpired:
            why = f"ended at its limit of {part.limit_s} s"
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    took_s = time.perf_counter() - began_s
    if rows and why is None:
        print(table_row(name, rows, took_s), flush=True)
    else:
        print(f"| {name} | {why or 'no figure'} | | | | | | {took_s:.0f} |", flush=True)
    return why


def main() -> int:
    options = arguments()
    changed = said("git", "status", "-s", "-uno") != "-"
    print(f"commit {said('git', 'rev-parse', '--short', 'HEAD')}{', with changes' * changed}")
    query = "--query-gpu=name,memory.used,utilization.gpu"
    print(f"GPUs of this host: {said('nvidia-smi', query, '--format=csv,noheader')}\n\n{HEAD}")
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        failed = [measure(name, logs, dry=options.dry_run) for name in options.parts]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
