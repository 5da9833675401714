"""One run of train.py with the real engine that loses it, is killed and is resumed.

Engines that die in a game: test_partners.py, and tests/gpu/."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import processes
from tests.helpers.tiny_run import begin_warm, metrics_of, write_tiny
from tests.sglang import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
# Several passes over a rollout move the policy far.
SETTINGS = (
    "engine.kind=sglang",
    f"engine.fast={str(tiny.ENGINE['fast']).lower()}",
    "engine.max_cache_tokens=16384",
    "algorithm.epochs=10",
    "save_every=1",
)

# The last step of the interrupted run, which has no end of its own, and of the resumed one.
KILLED_IN, LAST_STEP = 2, 3


def check_finished(folder: pathlib.Path, num_steps: int) -> list[dict[str, Any]]:
    """The run's metrics. Each step ran once, engine and trainer agreed in it, and the final policy
    can be loaded.

    After hundreds of passes over a rollout all groups of the next may have zero variance, so that
    nothing trains; in the first step this does not happen.
    """
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert lines[0]["num_trained_tokens"] > 0
    for line in lines:
        assert line["sync_check_mismatch"] < 1e-4
        if line["num_trained_tokens"] > 0:
            assert line["mismatch_mean"] < 1e-4
            assert line["mismatch_max"] < 1e-3
    for stage in ("before", "after"):
        held_out = json.loads((folder / f"held_out_{stage}.json").read_text())
        assert len(held_out["sampled"]["scores"]) == 8
    first, last = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("warm_start", "final")
    )
    before, after = first.state_dict(), last.state_dict()
    assert before.keys() == after.keys()
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)
    with torch.no_grad():
        assert last(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    return lines


@dataclass(frozen=True)
class Interrupted:
    """What the run printed until SIGKILL ended it, and what that left."""

    folder: pathlib.Path
    output: str
    num_processes: int
    left: list[Any]


def run_words(folder: pathlib.Path) -> tuple[str, ...]:
    return ("--config", str(write_tiny(folder)), f"out={folder}", *SETTINGS)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """SIGSTOP goes to the scheduler in the first update. In the second one it is stopped again and
    the trainer is killed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    begin_warm(folder)
    words = (*run_words(folder), "steps=1000000")
    process = processes.start(HERE / "interrupted.py", *words, path=(HERE / "stand_ins",))
    try:
        output = processes.read_until(process, f'MARK update {{"step": {KILLED_IN - 1}}}')
        everyone = processes.tree(process)
        schedulers = [p for p in everyone if p.name().startswith("sglang::sche")]
        for scheduler in schedulers:
            scheduler.suspend()
    finally:
        process.kill()
    left = processes.left(everyone)
    process.communicate(timeout=processes.HANG_S)
    yield Interrupted(folder, output, len(everyone), left)


def test_an_engine_that_hangs_in_an_update_is_restarted(interrupted: Interrupted) -> None:
    output = interrupted.output
    assert output.count("engine up") == 2
    assert "gave no answer within 5 s during a weight push" in output
    assert "engine failure 1 of 3 in a row, rank 0" in output
    (line,) = metrics_of(interrupted.folder)  # it is written before the step's push
    assert line["num_engine_restarts"] == 0 and line["num_games"] == 16


def test_a_trainer_killed_in_an_update_leaves_no_process_though_its_engine_is_stopped(
    interrupted: Interrupted,
) -> None:
    """The processes are the trainer, the scheduler, the detokenizer and a helper."""
    assert interrupted.num_processes >= 4
    assert interrupted.left == []


def test_the_killed_run_is_resumed_by_two_ranks_with_an_engine_each(
    interrupted: Interrupted,
) -> None:
    words = (*run_words(interrupted.folder), f"steps={LAST_STEP}")
    ranks = processes.start(ROOT / "train.py", *words, forked=2, path=(HERE / "stand_ins",))
    try:
        output = processes.read_until(ranks, "engine up")
        everyone = processes.tree(ranks)
        output += ranks.communicate(timeout=processes.HANG_S)[0]
    finally:
        ranks.kill()
    assert ranks.returncode == 0, output
    assert output.count("engine up") == 2
    assert "self-play took the score from" in output
    lines = check_finished(interrupted.folder, LAST_STEP)
    assert all(line["num_games"] == 16 for line in lines)
    assert processes.left(everyone) == []
