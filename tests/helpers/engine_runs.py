"""One run of `train.py` with a real engine that loses it, is killed and is resumed, as tests that
each engine's set imports; and what the scripts of these sets share.

The set has the fixture `interrupted`, which `interrupt` makes, for the tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.helpers import processes
from tests.helpers.processes import say
from tests.helpers.tiny_run import begin_warm, metrics_of, write_tiny

ROOT = Path(__file__).resolve().parents[2]
# The last step of the interrupted run, which has no end of its own, and of the resumed one.
KILLED_IN, LAST_STEP = 2, 3


@dataclass(frozen=True)
class Interrupted:
    """A run, what it printed until SIGKILL ended it, and what that left."""

    folder: Path
    words: tuple[str, ...]
    path: tuple[Path, ...]
    output: str
    num_processes: int
    left: list[Any]


def interrupt(
    script: Path, folder: Path, *settings: str, engine: str, path: tuple[Path, ...] = ()
) -> Interrupted:
    """The script stops the engine's process, whose title begins with `engine`, in the first update.
    In the second one it is stopped again and the trainer is killed."""
    begin_warm(folder, *settings)
    words = ("--config", str(write_tiny(folder)), f"out={folder}", *settings)
    # Several passes over a rollout move the policy far.
    words += ("algorithm.epochs=10", "save_every=1")
    process = processes.start(script, *words, "steps=1000000", path=path)
    try:
        output = processes.read_until(process, f'MARK update {{"step": {KILLED_IN - 1}}}')
        everyone = processes.tree(process)
        for child in everyone:
            if child.name().startswith(engine):
                child.suspend()
    finally:
        process.kill()
    left = processes.left(everyone)
    process.communicate(timeout=processes.HANG_S)
    return Interrupted(folder, words, path, output, len(everyone), left)


def check_finished(folder: Path, num_steps: int) -> None:
    """Each step ran once, engine and trainer agreed in it, and the final policy can be loaded.

    After hundreds of passes over a rollout all groups of the next may have zero variance, so that
    nothing trains; in the first step this does not happen.
    """
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert lines[0]["num_trained_tokens"] > 0
    for line in lines:
        assert line["num_games"] == 16 and line["sync_check_mismatch"] < 1e-4
        if line["num_trained_tokens"] > 0:
            assert line["mismatch_mean"] < 1e-4
            assert line["mismatch_max"] < 1e-3
    for stage in ("before", "after"):
        held_out = json.loads((folder / f"held_out_{stage}.json").read_text())
        assert len(held_out["sampled"]["scores"]) == 4
    first, last = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("warm_start", "final")
    )
    before, after = first.state_dict(), last.state_dict()
    assert before.keys() == after.keys()
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)
    with torch.no_grad():
        assert last(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_an_engine_that_hangs_in_an_update_is_restarted(interrupted: Interrupted) -> None:
    output = interrupted.output
    assert output.count("engine up") == 2
    assert "gave no answer within 5 s during a weight push" in output
    assert "engine failure 1 of 3 in a row, rank 0" in output
    (line,) = metrics_of(interrupted.folder)  # it is written before the step's push
    assert line["num_engine_restarts"] == 0 and line["num_games"] == 16


def test_a_trainer_killed_in_an_update_leaves_no_process_though_its_engine_is_stopped(
    interrupted: Interrupted, num_processes: int
) -> None:
    assert interrupted.num_processes >= num_processes
    assert interrupted.left == []


def test_the_killed_run_is_resumed_by_two_ranks_with_an_engine_each(
    interrupted: Interrupted,
) -> None:
    words = (*interrupted.words, f"steps={LAST_STEP}")
    ranks = processes.start(ROOT / "train.py", *words, forked=2, path=interrupted.path)
    try:
        output = processes.read_until(ranks, "engine up")
        everyone = processes.tree(ranks)
        output += ranks.communicate(timeout=processes.HANG_S)[0]
    finally:
        ranks.kill()
    assert ranks.returncode == 0, output
    assert output.count("engine up") == 2
    assert "self-play took the score from" in output
    check_finished(interrupted.folder, LAST_STEP)
    assert processes.left(everyone) == []


# --- in a script ----------------------------------------------------------------------------------


def broken(start: Callable[[str], object], folder: str) -> None:
    """Start an engine whose weight file is truncated, and say its error."""
    copy = shutil.copytree(folder, f"{folder} broken")  # another trainer reads the folder
    weights = Path(copy) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    try:
        start(copy)
    except RuntimeError as error:
        say("broken", error=str(error))


def train(children: Sequence[BaseProcess]) -> None:
    """Train until a signal comes; also start a child that is none of the engine's `children`."""
    bystander = subprocess.Popen(
        ["sleep", "3600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        say("training", bystander=bystander.pid)  # the signal can follow at once
        while True:
            torch.randn(64, 64) @ torch.randn(64, 64)
            time.sleep(0.01)  # other tests run meanwhile
    finally:
        say("finally", alive=[p.is_alive() for p in children])
