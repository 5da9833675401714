"""A long run needs no more memory, files, threads or processes than a short one."""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import pytest

from tests.helpers.tiny_run import begin_warm, write_tiny

ROOT = Path(__file__).resolve().parents[2]
STEPS = 500
SMALL = (
    "rollout={instances: 2, group_size: 2, max_turns: 4, max_new_tokens: 24, max_game_tokens: 160}",
    *("methods.auxiliary_imitation={weight: 0.1, games: 2}", "save_every=20"),
    *("eval.every=20", "eval.num_games=4", "log_games_every=1"),
)


@dataclass(frozen=True)
class Use:
    """What a process holds: MiB of memory, and numbers of handles, threads, processes it started,
    temporary files, and files of its run folder."""

    mib: float
    handles: int
    threads: int
    children: int
    temporary: int
    files: int


def use_of(process: psutil.Process, run: Path, temporary: Path) -> Use:
    with process.oneshot():
        return Use(
            process.memory_info().rss / 2**20,
            process.num_fds(),
            process.num_threads(),
            len(process.children(recursive=True)),
            sum(1 for _ in temporary.rglob("*")),
            sum(1 for _ in run.rglob("*")),
        )


@pytest.mark.slow
@pytest.mark.nightly
def test_five_hundred_steps_grow_nothing(tmp_path: Path) -> None:
    """The medians over steps 400 to 500 and over steps 100 to 200: memory within 3 %, the rest
    equal. Evaluations and saves come every 20 steps."""
    run, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    begin_warm(run, *SMALL)
    command = [sys.executable, "train.py", "--config", str(write_tiny(run)), f"out={run}"]
    with (tmp_path / "log").open("w") as log:
        trainer = subprocess.Popen(
            [*command, *SMALL, f"steps={STEPS}"],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    uses: list[tuple[int, Use]] = []
    process = psutil.Process(trainer.pid)
    while trainer.poll() is None:
        time.sleep(0.02)
        metrics = run / "metrics.jsonl"
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if 100 <= step < STEPS:
            try:
                uses.append((step, use_of(process, run, temporary)))
            except (psutil.Error, OSError):
                continue  # a file or the process ended while it was counted
    assert trainer.returncode == 0, (tmp_path / "log").read_text()[-4000:]

    def median(low: int, high: int) -> Use:
        seen = [astuple(use) for step, use in uses if low <= step < high]
        assert len(seen) > 20
        return Use(*(statistics.median(column) for column in zip(*seen, strict=True)))

    early, late = median(100, 200), median(400, STEPS)
    print(f"steps 100 to 200: {early}\nsteps 400 to {STEPS}: {late}")
    assert late.mib < 1.03 * early.mib
    assert astuple(late)[1:] == astuple(early)[1:]
