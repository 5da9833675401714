"""A run with branch points: it trains on them, and its played games are those of a plain run."""

import json
from pathlib import Path

import pytest

from tests.helpers.processes import HANG_S, TESTS, start
from tests.helpers.tiny_run import (
    RUN_GAP,
    RUN_STEP,
    RUNS,
    begin_warm,
    finished,
    metrics_of,
    run_warm,
    write_tiny,
)
from tests.helpers.tolerance import near

BRANCHES = RUNS["branches"]


@pytest.fixture(scope="module")
def branched() -> Path:
    return finished(*BRANCHES)


def games_of(folder: Path, step: int) -> list[dict[str, object]]:
    lines = (folder / "games.jsonl").read_text().splitlines()
    return [game for line in lines if (game := json.loads(line))["step"] == step]


def test_a_run_with_branches_trains_on_them(branched: Path) -> None:
    for line in metrics_of(branched):
        assert line["num_branch_points"] > 0 and 0 <= line["zero_variance_branches"] <= 1
        assert line["num_games"] == 16 < line["num_branch_games"]
        assert 0 < line["num_continuation_tokens"] < line["num_branch_tokens"]
        assert line["num_branch_tokens"] < line["num_generated_tokens"]
        assert line["num_trained_tokens"] > 0 and line["mismatch_max"] < RUN_GAP
    assert any("branches" in game for game in games_of(branched, 1))


def test_the_played_games_are_those_of_a_plain_run(branched: Path, tmp_path: Path) -> None:
    """The same weights play the first step, and branches change none of its random draws."""
    folder = run_warm(tmp_path / "run", "log_games_every=1", "steps=1", "eval.final_games=1")
    games = [{k: v for k, v in g.items() if k != "branches"} for g in games_of(branched, 1)]
    assert games == games_of(folder, 1) and len(games) == 16


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(branched: Path, tmp_path: Path) -> None:
    """Sibling turns may be on different ranks and still form one group."""
    folder = tmp_path / "run"
    begin_warm(folder)
    train, settings = TESTS.parent / "train.py", ["--config", str(write_tiny(folder))]
    process = start(train, *settings, f"out={folder}", *BRANCHES, torchrun=2)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output[-4000:]
    alone, shared = metrics_of(branched)[0], metrics_of(folder)[0]
    assert shared.keys() == alone.keys()
    counts = [name for name in alone if name.startswith(("num_", "zero_variance_"))]
    for name in (*counts, "score", "branch_variance"):
        assert shared[name] == pytest.approx(alone[name], abs=1e-12), name
    for name in ("policy_loss", "grad_norm", "entropy", "ratio_mean"):
        assert shared[name] == near(alone[name], RUN_STEP), name
