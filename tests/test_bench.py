"""The benches run: each on its tiny shape on a CPU, by the path that the true shapes take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_bench(name: str, *arguments: str) -> str:
    """What `python -m bench.NAME --dry-run …` prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--dry-run", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_loop_bench_measures_every_stage_of_a_step(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run_bench("loop", "--out", str(out))
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    stages = [row[f"{s}_s"] for s in ("play", "credit", "sleep", "score", "update", "push", "gate")]
    assert all(seconds > 0 for seconds in stages)
    assert row["step_s"] > sum(stages) * 0.95
    assert row["num_games"] == 4
    # Two tries of 8 tokens a game, all of them trained on, whatever the words.
    assert row["num_generated_tokens"] == 4 * 2 * 8
    assert row["num_packed_tokens"] > row["num_generated_tokens"]
    assert row["gap_mean"] < 1e-4


def test_the_table_has_a_line_for_each_case_and_names_what_failed(tmp_path: Path) -> None:
    printed = run_bench("table", "--out", str(tmp_path / "table"))
    lines = [line for line in printed.splitlines() if line.startswith("| tiny")]
    assert [line.split(" | ")[1] for line in lines] == ["1", "2"]
    assert all(line.count(" | ") == printed.splitlines()[-4].count(" | ") for line in lines)
    command = [sys.executable, "-m", "bench.table", "--dry-run", "--out", str(tmp_path / "failed")]
    done = subprocess.run(
        [*command, "--games", "one"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "failed: tiny_on_1, tiny_on_2" in done.stderr
    assert "invalid int value: 'one'" in (tmp_path / "failed" / "tiny_on_1.log").read_text()
