"""Two trainers and one run folder: the second is refused while the first lives, and no longer."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import processes
import pytest
from tiny_run import write_tiny

from selfplay.config.settings import SettingsError
from selfplay.metrics.run_lock import hold_run

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_is_held_until_the_file_is_closed(tmp_path: Path) -> None:
    first = hold_run(tmp_path / "run")
    with pytest.raises(SettingsError) as refusal:
        hold_run(tmp_path / "run")
    for seen in (str(tmp_path / "run"), f"pid {os.getpid()}", socket.gethostname()):
        assert seen in str(refusal.value)
    hold_run(tmp_path / "another").close()
    first.close()
    hold_run(tmp_path / "run").close()


@pytest.mark.parametrize("ranks", [0, 2], ids=["one process", "two ranks"])
def test_a_second_trainer_is_refused_until_the_first_is_killed(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    words = ["--config", str(write_tiny(folder)), f"out={folder}", "steps=0"]
    words += ["warm_start.num_games=0", "eval.final_games=4"]
    first = processes.start(ROOT / "train.py", *words, "steps=100000")
    processes.read_until(first, "1/100000")
    first.send_signal(signal.SIGSTOP)  # it leaves the cores to the others and keeps the folder
    held = sorted(path for path in folder.rglob("*") if path.is_file())

    second = processes.start(ROOT / "train.py", *words, torchrun=ranks)
    output = second.communicate(timeout=300)[0]
    told = [line for line in output.splitlines() if "train.py: out" in line]
    assert second.returncode != 0 and len(told) == max(1, ranks), output
    assert str(folder) in told[0] and f"pid {first.pid} on" in told[0]
    if not ranks:
        assert second.returncode == 2 and len(output.splitlines()) == 1, output
    assert first.poll() is None
    assert set(held) <= {path for path in folder.rglob("*") if path.is_file()}

    first.send_signal(signal.SIGKILL)
    first.wait()
    third = processes.start(ROOT / "train.py", *words)
    output = third.communicate(timeout=300)[0]
    assert third.returncode == 0, output
