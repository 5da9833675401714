"""The same settings are the same run, in one go or several; whatever ends one is in
test_interrupted.py."""

import shutil
import sys
from pathlib import Path

import pytest

from selfplay.api.run import export_final
from selfplay.partners.checkpoints import find_source
from tests.helpers.interrupted import stopped
from tests.helpers.tiny_run import (
    assert_same_run,
    finished,
    run_tiny,
    run_warm,
    same_weights,
)


@pytest.fixture(scope="module")
def straight() -> Path:
    """Four steps without a break, a checkpoint after the second and the last."""
    return finished()


@pytest.mark.slow
def test_the_same_settings_give_the_same_run(straight: Path, tmp_path: Path) -> None:
    """Includes a new warm start, which equals the shared one."""
    assert run_tiny(tmp_path / "run") == 0
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.slow
def test_more_steps_later_are_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a schedule that does not depend on the length: two steps, then two more, are four."""
    constant = "optim.schedule=constant"
    run_warm(tmp_path / "short", constant, "steps=2")
    before = (tmp_path / "short" / "held_out_after.json").read_text()
    capsys.readouterr()
    assert run_tiny(tmp_path / "short", constant) == 0
    assert f"{tmp_path / 'short'} continues with step 3 of 4\n" in capsys.readouterr().out
    assert_same_run(finished(constant), tmp_path / "short")
    after = (tmp_path / "short" / "held_out_after.json").read_text()
    assert after != before, "the held-out games of the shorter run are played again"


def test_a_continued_run_is_found_by_its_newest_weights(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two more steps, stopped before the final export: the export of step 4 and its held-out games
    stay, but the newest weights are those of the checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    longer = folder / "checkpoints" / "step_000006" / "hf"
    assert find_source(folder).weights == folder / "final"
    with stopped(export_final), pytest.raises(KeyboardInterrupt):
        run_tiny(folder, "steps=6")
    ended = (straight / "held_out_after.json").read_text()
    assert (folder / "held_out_after_step_000004.json").read_text() == ended
    assert (folder / "held_out_after.json").read_text() != ended
    assert "held_out_after.json is now held_out_after_step_000004.json" in capsys.readouterr().out
    assert find_source(folder).weights == longer
    assert same_weights(folder / "final", straight / "final")
    assert not same_weights(folder / "final", longer)

    assert run_tiny(folder, "steps=6") == 0
    assert find_source(folder).weights == folder / "final"
    assert same_weights(folder / "final", longer)
    # An export without a recorded step counts as older than the newest checkpoint.
    (folder / "final" / "progress.json").unlink()
    assert find_source(folder).weights == longer


def test_a_finished_run_started_again_is_unchanged(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    times = {p: p.stat().st_mtime_ns for p in (folder / "checkpoints").rglob("*") if p.is_file()}
    assert run_tiny(folder) == 0
    said = capsys.readouterr().out
    assert "already has 4 of 4 steps; increase steps" in said
    last = said.splitlines()[-1]
    assert last.startswith(f"the policy is in {folder}/final, the page is {folder}/report.html; ")
    assert last.endswith(f"{sys.orig_argv[0]} -m selfplay.apps.play {folder}")
    assert_same_run(straight, folder)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    # Settings that a longer run could change are not those of its policy, nor is the start.
    assert run_tiny(folder, "steps=3", "eval.final_games=1", "log_games_every=9") == 0
    assert "already has 4 of 3 steps" in capsys.readouterr().out
    for name in ("config.yaml", "code.txt"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes()
