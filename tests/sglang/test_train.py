"""Complete runs of train.py with the real engine: their results, and that ended runs leave nothing.

The runs share one warm start, made with the transformers engine. Runs go in parallel where the
tests allow it, because starting an engine takes most of a run's time.
"""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import processes
from tests.helpers.tiny_run import begin_warm, metrics_of, write_tiny

if TYPE_CHECKING:
    import psutil

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
# Several passes over a rollout move the policy far.
SETTINGS = (
    "engine.kind=sglang",
    "engine.max_cache_tokens=16384",
    "algorithm.epochs=10",
    "save_every=1",
)
FOR_EVER = "steps=1000000"

Train = Callable[..., tuple[subprocess.Popen[str], pathlib.Path]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """`start(name, *settings)` runs train.py in the folder of that name; with `how` it is
    `interrupted.py HOW`."""
    home = tmp_path_factory.mktemp("runs")
    started: list[subprocess.Popen[str]] = []

    def start_one(name: str, *settings: str, torchrun: int = 0, how: str = "") -> Any:
        folder = home / name
        if not folder.exists():
            begin_warm(folder)
        words = ("--config", str(write_tiny(folder)), f"out={folder}", *SETTINGS, *settings)
        script = (HERE / "interrupted.py", how) if how else (ROOT / "train.py",)
        process = processes.start(*script, *words, torchrun=torchrun, path=(HERE / "stand_ins",))
        started.append(process)
        return process, folder

    yield start_one
    for process in started:
        if process.poll() is None:
            for one in processes.tree(process):
                one.kill()


def wait_for(process: subprocess.Popen[str], path: pathlib.Path) -> None:
    """Wait until a run has written this file."""
    until_s = time.perf_counter() + processes.HANG_S
    while not path.exists():
        check_running(process, until_s, f"without {path.name}")
        time.sleep(0.05)


def check_running(process: subprocess.Popen[str], until_s: float, how: str) -> None:
    """Fail with the run's output if it has ended or takes too long."""
    if process.poll() is not None or time.perf_counter() > until_s:
        process.kill()
        raise AssertionError(f"ended or stuck {how}:\n{process.communicate()[0]}")


def final_output(process: subprocess.Popen[str], *, num_starts: int = 1) -> str:
    """What the process printed from here to its end; it may start this many engines."""
    return process.communicate(timeout=num_starts * processes.HANG_S)[0]


def schedulers(everyone: list[psutil.Process]) -> list[psutil.Process]:
    """The engines' scheduler processes."""
    return [p for p in everyone if p.name().startswith("sglang::sche")]


def check_finished(folder: pathlib.Path, num_steps: int) -> None:
    """Each step ran once, engine and trainer agreed in it, and the final policy can be loaded.

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


@dataclass(frozen=True)
class Ended:
    """A run that a signal ended in an update; its processes were gone after `gone_s` seconds."""

    folder: pathlib.Path
    num_processes: int
    gone_s: float
    returncode: int


@pytest.fixture(scope="module")
def ended(start: Train) -> dict[str, Ended]:
    """SIGKILL in the second update, SIGTERM in a first update that would never end."""
    runs = {
        "kill": start("kill", FOR_EVER, how="mark"),
        "term": start("term", FOR_EVER, "algorithm.epochs=1000000", how="mark"),
    }
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
    marks = {"kill": 'MARK update {"step": 1}', "term": 'MARK update {"step": 0}'}
    results = {}
    for name, (process, folder) in runs.items():
        processes.read_until(process, marks[name])
        everyone = processes.tree(process)
        process.send_signal(signals[name])
        gone_s = processes.seconds_until_gone(everyone)
        results[name] = Ended(folder, len(everyone), gone_s, process.wait(processes.HANG_S))
    return results


@pytest.mark.parametrize("name", ["kill", "term"])
def test_a_signal_in_an_update_leaves_no_process(ended: dict[str, Ended], name: str) -> None:
    """The processes are the trainer, the scheduler, the detokenizer and two helpers."""
    assert ended[name].num_processes >= 4
    assert ended[name].gone_s < 10
    assert ended[name].returncode == {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM}[name]
    assert (len(metrics_of(ended[name].folder)) > 0) == (name == "kill")


def test_an_engine_that_hangs_in_an_update_and_then_dies_in_play_is_restarted(start: Train) -> None:
    """SIGSTOP goes to one of two schedulers in the first update, SIGKILL to one in the second
    step's games, at a turn before which some have ended: only the others are played again."""
    words = ("steps=3", "engine.processes=2", "engine.timeout_s=30")
    process, folder = start("interrupted", *words, how="interrupt")
    output = processes.read_until(process, "MARK killed")
    everyone = processes.tree(process)
    output += final_output(process, num_starts=3)
    assert process.returncode == 0, output
    assert processes.seconds_until_gone(everyone) < 10
    assert output.count("engine up") == 3 and output.count("MARK killed") == 1
    assert "gave no answer within 30 s during a weight push" in output
    assert re.search(r"engine failure 1 of 3 in a row, rank 0: the engine died during", output)
    lines = metrics_of(folder)
    # A line is written before the step's push, so the second line counts both.
    assert [line["num_engine_restarts"] for line in lines] == [0, 2, 0]
    assert all(line["num_games"] == 16 for line in lines)
    assert 0 < processes.marks(output)["played again"]["games"] < 16
    check_finished(folder, 3)


def test_a_killed_run_resumes_to_its_end_and_two_ranks_run_with_an_engine_each(
    ended: dict[str, Ended], start: Train
) -> None:
    folder, num_steps = ended["kill"].folder, len(metrics_of(ended["kill"].folder)) + 1
    again, _ = start("kill", f"steps={num_steps}")
    ranks, shared = start("ranks", "steps=2", torchrun=2)
    wait_for(ranks, shared / "held_out_before.json")
    everyone = processes.tree(ranks)
    assert len(schedulers(everyone)) == 2
    for process, run, num, num_engines in ((again, folder, num_steps, 1), (ranks, shared, 2, 2)):
        output = final_output(process)
        assert process.returncode == 0, output
        assert output.count("engine up") == num_engines
        assert "self-play took the score from" in output
        check_finished(run, num)
    assert processes.seconds_until_gone(everyone) < 10
