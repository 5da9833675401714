"""Signals, crashes, hangs: the engine ends with its trainer, and no call waits for ever."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import processes
from tests.sglang import tiny

if TYPE_CHECKING:
    import psutil

Start = Callable[..., subprocess.Popen[str]]
HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts `trainer_script.py` with the stand-ins; the module's end kills what it started."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        path = (HERE, HERE / "stand_ins")
        started.append(processes.start(HERE / "trainer_script.py", *arguments, path=path))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def trainers(model: str, start: Start) -> dict[str, subprocess.Popen[str]]:
    """Two trainers, started at the same time, which go through several cases each."""
    return {cases[-1]: start(*cases, model) for cases in (("broken", "plain"), ("public", "crash"))}


@pytest.fixture(scope="module")
def before_training(trainers: dict[str, subprocess.Popen[str]]) -> dict[str, dict[str, Any]]:
    """What the trainer of several cases reported until it trains."""
    return processes.marks(processes.read_until(trainers["plain"], "MARK training"))


@pytest.fixture(scope="module")
def public(trainers: dict[str, subprocess.Popen[str]]) -> dict[str, dict[str, Any]]:
    """What the other trainer reported of an engine by SGLang's public calls."""
    return processes.marks(processes.read_until(trainers["crash"], "MARK stopped"))


def family(process: subprocess.Popen[str], reports: dict[str, Any]) -> list[psutil.Process]:
    """The trainer's and engine's processes, without the child that is not the engine's."""
    return [p for p in processes.tree(process) if p.pid != reports["training"].get("bystander")]


def test_a_failed_start_raises(before_training: dict[str, dict[str, Any]]) -> None:
    error = before_training["broken"]["error"]
    assert "died during initialization (exit code: " in error and "\n" not in error


@pytest.mark.fast_engine
def test_an_engine_takes_a_scheduler_that_waits_and_ends_the_others(
    before_training: dict[str, dict[str, Any]],
) -> None:
    started = before_training["started"]
    assert started["scheduler"] == started["early"]
    assert started["left"] == -signal.SIGKILL


def test_sigterm_during_training_is_an_ordinary_exit(
    trainers: dict[str, subprocess.Popen[str]], before_training: dict[str, dict[str, Any]]
) -> None:
    """`finally` runs while the engine lives, then the engine is closed; another child lives on."""
    process = trainers["plain"]
    everyone = family(process, before_training)
    assert any("sglang::scheduler" in " ".join(p.cmdline()) for p in everyone)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=processes.HANG_S)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert processes.marks(output)["finally"]["alive"] == [True, True]
    assert processes.left(everyone) == []
    os.kill(before_training["training"]["bystander"], signal.SIGKILL)  # it still runs


def test_a_plain_engine_that_dies_or_is_silent_faults_and_starts_again(
    public: dict[str, dict[str, Any]],
) -> None:
    """In a process of its own: SGLang reports a death by a signal to all engines of a process."""
    assert "exit code -9" in public["killed"]["error"]
    again = public["again"]
    assert again["error"] == "none" and not again["lost"] and not any(again["alive"])
    assert "silent for 1 s" in public["stopped"]["error"] and public["stopped"]["lost"]


@pytest.mark.fast_engine
def test_a_crash_fails_pending_and_later_requests_and_sigterm_works_in_a_collective(
    trainers: dict[str, subprocess.Popen[str]], public: dict[str, dict[str, Any]]
) -> None:
    process = trainers["crash"]
    reports = processes.marks(processes.read_until(process, "MARK training"))
    died = r"died during generation: pid \d+ with exit code -9"
    assert re.search(died, reports["crash"]["error"])
    assert re.search(r"the engine is gone \(pid \d+ with exit code -9\)", reports["asked"]["error"])
    everyone = family(process, reports)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert processes.left(everyone) == []
    process.communicate(timeout=processes.HANG_S)


@pytest.mark.nightly
def test_a_trainer_killed_while_the_engine_starts_leaves_nothing_behind(
    model: str, start: Start
) -> None:
    process = start("crash", model)
    until_s = time.perf_counter() + processes.HANG_S
    while len(everyone := processes.tree(process)) < 4 and time.perf_counter() < until_s:
        time.sleep(0.05)
    process.kill()
    assert len(everyone) >= 4
    # The children check for their trainer once its main module is imported: 3 s on an idle machine.
    assert processes.left(everyone) == []
    process.communicate(timeout=processes.HANG_S)


@pytest.mark.fast_engine
def test_an_engine_waits_for_its_kernels_before_it_gives_memory_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch_memory_saver unmaps memory under kernels that still read it."""
    from sglang.srt.utils import torch_memory_saver_adapter as adapter

    from selfplay.engines.sglang.fast.patches import pause_when_idle

    calls: list[str] = []
    saver = adapter._TorchMemorySaverAdapterReal
    monkeypatch.setattr(saver, "pause", lambda self, tag: calls.append(f"pause {tag}"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: calls.append("wait"))
    pause_when_idle()
    saver().pause("weights")
    assert calls == ["wait", "pause weights"]
