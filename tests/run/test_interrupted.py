"""Whatever ends a run, and wherever, the same command goes on: weights bit for bit, every metric.

Each row ends a run that has made two of its four steps.
"""

import errno
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.checkpoint as dcp

from selfplay import checkpoint, step
from selfplay.api.run import export_final
from selfplay.checkpoint import checkpoints
from selfplay.errors import EngineDisagrees
from selfplay.learner.update import update_policy
from selfplay.metrics.run_folder import hold_run, open_run
from selfplay.weight_sync.supervised import SupervisedPolicy
from tests.helpers.interrupted import replaced, stopped
from tests.helpers.processes import largest_file
from tests.helpers.shared_work import slow_except
from tests.helpers.tiny_run import (
    RUNS,
    assert_same_run,
    begin_halfway,
    begin_warm,
    finished,
    go_on_from,
    metrics_of,
    run_tiny,
    write_tiny,
)

SIGTERM = 128 + signal.SIGTERM


class End(NamedTuple):
    """What ends the run, as a block inside which it does; its exit status, or what it raises; the
    newest checkpoint after it; what its one line says; and settings of the run that ends."""

    ends: Callable[[], AbstractContextManager[Any]]
    status: int | type[BaseException]
    newest: int
    said: str = ""
    settings: tuple[str, ...] = ()


def left_half_way(write: Callable[..., Any], *given: Any) -> Any:
    """Torch's writer raises an error of its own when SIGTERM leaves it half-way."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*given)
    finally:
        raise RuntimeError("unexpected pos 704 vs 598")


WRITE, STAYS = dcp.FileSystemWriter.write_data, "the same command continues"
ENDS = {
    "SIGKILL in a push": End(lambda: stopped(step.push, 2, signal.SIGKILL), -signal.SIGKILL, 2),
    "Ctrl-C in play": End(lambda: stopped(step.play), KeyboardInterrupt, 2),
    "rollout disagrees": End(
        lambda: stopped(update_policy, 2, EngineDisagrees("the rollout")), 1, 3, "with step 4"
    ),
    "push disagrees": End(
        lambda: stopped(SupervisedPolicy.push, 2, EngineDisagrees("a push")), 1, 3, "with step 4"
    ),
    "monitor": End(
        nullcontext, 1, 3,
        "'stop if entropy < 50 over 1' stopped the run after step 3: … continues with step 4",
        ("monitors=[stop if entropy < 50 over 1]",),
    ),
    "Ctrl-C in the export": End(lambda: stopped(export_final), KeyboardInterrupt, 4),
    "SIGTERM at the start": End(
        lambda: stopped(open_run, by=signal.SIGTERM), SIGTERM, 2, "ended by SIGTERM; the last save"
    ),
    "SIGTERM in a save": End(lambda: stopped(WRITE, by=signal.SIGTERM), SIGTERM, 2),
    "SIGTERM leaves a file half-way": End(lambda: replaced(WRITE, left_half_way), SIGTERM, 2),
    # A checkpoint has 0.7 MB, the logs 40 kB, the folder's first files less.
    "disk full in a save": End(lambda: largest_file(300_000), 1, 2, f"File too large … {STAYS}"),
    "disk full in a log": End(lambda: largest_file(15_000), 1, 2, f"File too large … {STAYS}"),
    "disk full at the start": End(lambda: largest_file(20), 1, 2, f"File too large … {STAYS}"),
}  # fmt: skip
FAST = (
    *("SIGKILL in a push", "rollout disagrees", "push disagrees", "SIGTERM at the start"),
    *("SIGTERM in a save", "disk full in a save"),
)


def ended(how: End, run: Path) -> None:
    if how.status == -signal.SIGKILL:
        child = os.fork()
        if child == 0:
            try:
                with how.ends():
                    run_tiny(run, *how.settings)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == how.status
        return
    with how.ends(), nullcontext() if isinstance(how.status, int) else pytest.raises(how.status):
        assert run_tiny(run, *how.settings) == how.status


@pytest.mark.parametrize("name", slow_except(ENDS, *FAST))
def test_a_run_that_was_ended_goes_on_bit_for_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says its cause in one line, lets go what it held, and leaves no half file in the way."""
    how, run, handler = ENDS[name], tmp_path / "run", signal.getsignal(signal.SIGTERM)
    begin_halfway(finished(), run)
    write_tiny(run)  # before the disk is full
    ended(how, run)
    assert signal.getsignal(signal.SIGTERM) == handler
    hold_run(run).close()
    *_, line = capsys.readouterr().err.splitlines() or [""]
    place = 0
    for part in how.said.split("…"):
        assert (place := line.find(part.strip(), place)) >= 0, line
    assert checkpoints(run)[-1].name == f"step_{how.newest:06d}"
    half = [p for p in run.rglob("*") if p.name.startswith(".partial-") or p.suffix == ".new"]
    assert not half or how.status != 1, "only a signal leaves a half file"
    assert run_tiny(run) == 0
    assert_same_run(finished(), run)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        (lambda: stopped(step.push, by=signal.SIGTERM), SIGTERM),
        (lambda: stopped(step.push, by=OSError(errno.ENOSPC, "disk is full")), 1),
    ],
)
def test_a_run_that_ends_before_its_first_save_says_that_it_starts_again(
    ends: Callable[[], AbstractContextManager[Any]],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    begin_warm(run)
    ended(End(ends, status, 0, "", ("save_every=9",)), run)
    *_, line = capsys.readouterr().err.splitlines()
    assert "no checkpoint is saved yet (save_every: 9)" in line and "first step" in line
    assert not checkpoints(run)


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_says_so_and_goes_on_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    begin_warm(run)

    def push(real: Callable[..., Any], *arguments: Any) -> Any:
        run.rename(moved)
        (run / "checkpoints").stat()

    with replaced(step.push, push):
        assert run_tiny(run, "steps=2") == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"train.py: {run} must stay in place during its run, got no such folder"
    assert not run.exists() and run_tiny(moved, "steps=2") == 0


def test_a_state_in_several_files_is_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends the save of step 4, in one of the threads that write it; step 3 is resumed."""
    monkeypatch.setattr(checkpoint, "PART_BYTES", 10_000)
    run = tmp_path / "run"
    begin_halfway(finished(), run)
    ended(End(lambda: stopped(WRITE, 5, by=signal.SIGTERM), SIGTERM, 3, "", ("save_every=1",)), run)
    saved = checkpoints(run)[-1]
    sizes = sorted(path.stat().st_size for path in (saved / "state").glob("*.distcp"))
    assert saved.name == "step_000003" and len(sizes) == 4 and sizes[-1] < 2 * sizes[0]
    assert run_tiny(run) == 0
    assert_same_run(finished(), run)


@pytest.mark.parametrize("run", slow_except(RUNS, "pool", "critic", "adapters"))
def test_each_kind_of_trainer_state_is_resumed_bit_for_bit(run: str, tmp_path: Path) -> None:
    """From the second newest checkpoint. The plain one is resumed by each row above."""
    straight = finished(*RUNS[run])
    last = metrics_of(straight)[-1]
    assert last["num_trained_tokens"] > 0, "a run that learns nothing has nothing to lose"
    go_on_from(straight, tmp_path / "run", *RUNS[run])
    assert_same_run(straight, tmp_path / "run")
