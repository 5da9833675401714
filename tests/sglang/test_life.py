"""Signals, crashes, hangs on the real engine: it ends with its trainer, which never waits for ever."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest
import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp("model"))


def family(process: subprocess.Popen[str], said: dict[str, Any]) -> list[psutil.Process]:
    """The trainer and its engine, without the child that is not the engine's."""
    return [p for p in tiny.tree(process) if p.pid != said["training"].get("bystander")]


def test_sigterm_during_training_is_an_ordinary_exit(model: str) -> None:
    """`finally` runs while the engine lives, then it is closed; another child lives on."""
    process = tiny.start("trainer_script.py", "plain", model)
    said = tiny.marks(tiny.read_until(process, "MARK training"))
    processes = family(process, said)
    assert sum("sglang::" in " ".join(p.cmdline()) for p in processes) == 2
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert tiny.marks(output)["finally"]["alive"] == [True, True]
    assert tiny.seconds_until_gone(processes) < 10
    bystander = psutil.Process(said["training"]["bystander"])
    assert bystander.is_running()
    bystander.kill()


def test_a_hang_ends_with_the_time_out_and_sigkill_takes_the_stopped_engine_along(
    model: str,
) -> None:
    process = tiny.start("trainer_script.py", "hang", model)
    said = tiny.marks(tiny.read_until(process, "MARK training"))
    assert (
        said["asked"]["error"]
        == "the engine gave no answer within 3 s during generation: 3 requests wait"
    )
    assert 3 <= said["asked"]["after_s"] < 6
    assert "the engine is gone (silent for 3 s" in said["asked again"]["error"]
    processes = family(process, said)
    process.kill()
    assert tiny.seconds_until_gone(processes) < 10
    psutil.Process(said["training"]["bystander"]).kill()
    process.communicate(timeout=5)


def test_a_crash_during_training_is_told_at_the_next_call_and_sigterm_is_heard_in_a_collective(
    model: str,
) -> None:
    process = tiny.start("trainer_script.py", "crash", model)
    said = tiny.marks(tiny.read_until(process, "MARK training"))
    assert re.search(r"the engine is gone \(pid \d+ with exit code -9\)", said["asked"]["error"])
    assert said["asked"]["after_s"] < 1
    processes = family(process, said)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert tiny.seconds_until_gone(processes) < 10
    process.communicate(timeout=5)


def test_a_crash_while_asked_and_a_failed_start_are_errors_at_once(model: str) -> None:
    process = tiny.start("trainer_script.py", "crash while asked", "broken", model)
    output, _ = process.communicate(timeout=180)
    said = tiny.marks(output)
    assert process.returncode == 0, output
    assert re.search(
        r"died during generation: pid \d+ with exit code -9", said["crash while asked"]["error"]
    )
    assert said["crash while asked"]["after_s"] < 5
    assert "died during initialization" in said["broken"]["error"]


def test_a_trainer_killed_while_the_engine_starts_leaves_nothing_behind(model: str) -> None:
    process = tiny.start("trainer_script.py", "plain", model)
    until_s = time.perf_counter() + 60
    while len(processes := tiny.tree(process)) < 4 and time.perf_counter() < until_s:
        time.sleep(0.05)
    process.kill()
    assert len(processes) >= 4
    # The children look for their trainer once its own module is imported: 3 s where nothing else
    # runs.
    assert tiny.seconds_until_gone(processes, limit_s=30) < 20
    process.communicate(timeout=5)
