"""Signals, crashes, hangs: the engine ends with its trainer, and no call waits for ever."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import processes
from tests.vllm import tiny

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """One that goes through all cases and then trains."""
    folder = tiny.save(tmp_path_factory.mktemp("model"))
    process = processes.start(HERE / "trainer_script.py", folder)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def reports(trainer: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """What it reported until it trains."""
    return processes.marks(processes.read_until(trainer, "MARK training"))


def test_a_failed_start_raises_one_line(reports: dict[str, dict[str, Any]]) -> None:
    error = reports["broken"]["error"]
    assert "initialization failed" in error and "\n" not in error


def test_an_engine_that_dies_in_a_game_faults_and_starts_again(
    reports: dict[str, dict[str, Any]],
) -> None:
    crash, again = reports["crash"], reports["again"]
    assert re.search(r"during generation|engine failed", crash["error"])
    assert re.search(r"the engine is gone \(pid \d+ with exit code -9\)", crash["later"])
    assert crash["lost"] and not again["lost"] and not again["old"]
    assert again["error"] == "none"


def test_an_engine_that_is_silent_faults_and_starts_again(
    reports: dict[str, dict[str, Any]],
) -> None:
    silent, again = reports["silent"], reports["once more"]
    assert "no answer within 2 s during generation: 3 requests wait" in silent["error"]
    assert "silent for 2 s during generation" in silent["later"] and silent["lost"]
    assert again == {"error": "none", "lost": False}


def test_sigterm_during_training_is_an_ordinary_exit(
    trainer: subprocess.Popen[str], reports: dict[str, dict[str, Any]]
) -> None:
    """`finally` runs while the engine lives, then the engine is closed; another child lives on."""
    bystander = reports["training"]["bystander"]
    everyone = [p for p in processes.tree(trainer) if p.pid != bystander]
    trainer.send_signal(signal.SIGTERM)
    output, _ = trainer.communicate(timeout=processes.HANG_S)
    assert trainer.returncode == 128 + signal.SIGTERM, output
    assert processes.marks(output)["finally"]["alive"] == [True]
    assert processes.left(everyone) == []
    os.kill(bystander, signal.SIGKILL)  # it still runs
