"""A run and its saves: damaged ones are refused by name, and what a killed run left behind is gone
after the next start."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import eval as evaluation
import selfplay
from selfplay.apps.publish import __main__ as publish
from selfplay.checkpoint import checkpoints
from selfplay.errors import RunEnds, SettingsError
from selfplay.metrics.run_folder import hold_run
from selfplay.partners.checkpoints import find_source
from tests.helpers import processes
from tests.helpers.casts import TRAINED, trained
from tests.helpers.tiny_run import (
    RUNS,
    assert_same_run,
    begin_warm,
    finished,
    metrics_of,
    run_tiny,
    same_weights,
    write_tiny,
)

ROOT = Path(__file__).resolve().parents[2]
STATE = "state/__0_0.distcp"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with checkpoints of steps 2 and 4."""
    shutil.copytree(finished(), tmp_path / "run")
    return tmp_path / "run"


def overwrite(path: Path, content: bytes, *, at: float) -> None:
    with path.open("r+b") as file:
        file.seek(int(at * path.stat().st_size))
        file.write(content)


def flipped(path: Path) -> None:
    overwrite(path, bytes(range(40)), at=0.5)


def zeroed(path: Path) -> None:
    """What a crash of the machine leaves; the manifest is from before digests."""
    overwrite(path, bytes(2048), at=0.0)
    (manifest,) = (p / "manifest.json" for p in path.parents if (p / "manifest.json").exists())
    manifest.write_text(json.dumps({"sizes": json.loads(manifest.read_text())["sizes"]}))


def without_state(path: Path) -> None:
    text = json.dumps({"step": 4, "state": []})
    path.write_text(text)
    (path.parent / "manifest.json").write_text(json.dumps({"sizes": {path.name: len(text)}}))


@pytest.mark.parametrize(
    ("file", "harm", "found"),
    [
        (STATE, flipped, f"{STATE} has other bytes than were written"),
        ("progress.json", cut, "progress.json has "),
        (STATE, zeroed, "it cannot be loaded (UnpicklingError: "),
        ("progress.json", without_state, "it cannot be loaded (AttributeError"),
    ],
)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    run: Path,
    file: str,
    harm: Callable[[Path], None],
    found: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = checkpoints(run)[-1]
    harm(newest / file)
    (run / "held_out_after.json").unlink()
    theirs = [
        newest.with_name("damaged_step_000004") / "a",
        newest.with_name("step_000001.new") / "a",
    ]
    for each in theirs:
        each.parent.mkdir()
        each.touch()
    assert run_tiny(run) == 0
    said = capsys.readouterr()
    assert f"{newest} is damaged: {found}" in said.err and "3/4" in said.out
    assert "it is now damaged_step_000004_2, and" in said.err
    assert newest.with_name("damaged_step_000004_2").exists()
    assert all(each.exists() for each in theirs)
    assert_same_run(finished(), run)


@pytest.mark.parametrize(
    ("name", "harm", "found"),
    [
        ("one", flipped, "policies/one/state/__0_0.distcp has other bytes"),
        pytest.param("one", zeroed, "it cannot be loaded", marks=pytest.mark.slow),
        ("other", zeroed, "it cannot be loaded"),
    ],
)
def test_policies_go_on_together_from_the_checkpoint_before_a_damaged_part_of_one(
    tmp_path: Path,
    name: str,
    harm: Callable[[Path], None],
    found: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also if the damage shows only when the parts of earlier policies are loaded."""
    run = tmp_path / "run"
    shutil.copytree(trained(), run)
    newest = checkpoints(run)[-1]
    harm(newest / "policies" / name / STATE)
    (run / "held_out_after.json").unlink()
    assert run_tiny(run, *TRAINED) == 0
    said = capsys.readouterr()
    assert f"{newest} is damaged: {found}" in said.err and "3/3" in said.out
    assert metrics_of(run) == metrics_of(trained())
    for each in ("one", "other"):
        assert same_weights(run / "final" / each, trained() / "final" / each)


@pytest.mark.slow
def test_one_ranks_part_that_cannot_be_loaded_is_damage_to_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_warm(run)
    words = ["--config", str(write_tiny(run)), f"out={run}"]

    def trained() -> str:
        ranks = processes.start(ROOT / "train.py", *words, forked=2)
        said = ranks.communicate(timeout=processes.HANG_S)[0]
        assert ranks.returncode == 0, said[-4000:]
        return said

    trained()
    newest = checkpoints(run)[-1]
    zeroed(newest / "state" / "__1_0.distcp")
    (run / "held_out_after.json").unlink()
    before = metrics_of(run)
    said = trained()
    assert said.count(f"{newest} is damaged: it cannot be loaded") == 1
    assert metrics_of(run) == before


def test_a_changed_policy_is_taken_by_no_program(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "final" / "model.safetensors"
    overwrite(weights, b"40 bytes, which no reader of tensors sees", at=0.9)
    for program, *words in (
        (publish.main, str(run), "me/pair"),
        (evaluation.main, str(run), "--num", "2"),
        (evaluation.main, str(run / "final"), "--num", "2"),
    ):
        assert program(words) == 2
        said = capsys.readouterr().err
        assert "final must be undamaged, got model.safetensors has other bytes" in said
        assert said.count("\n") == 1
    assert not (run / "hub").exists()
    path = f"model={{scratch: null, path: {run / 'final'}}}"
    assert run_tiny(run.with_name("other"), path, "warm_start.num_games=0") == 2
    assert "model.path: " in (said := capsys.readouterr().err) and "must be undamaged" in said


@pytest.mark.parametrize("name", ["metrics.jsonl", "held_out_before.json", "held_out_after.json"])
def test_a_record_that_a_run_goes_on_with_is_whole_or_named(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything changes. The log of steps is reversed, the other files are cut off."""
    path = run / name
    if name == "metrics.jsonl":
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::-1]))
    else:
        cut(path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert run_tiny(run, "steps=6") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{path} " in said and " must " in said
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before


def test_a_trainer_whose_lock_was_removed_ends_when_another_has_begun(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It saves nothing more. Until then it goes on, as it does if nobody else begins."""
    shutil.rmtree(checkpoints(run)[-1])
    (run / "held_out_after.json").unlink()
    with selfplay.start(str(write_tiny(run)), out=str(run)) as first:
        (run / ".lock").unlink()
        first.step()
        hold_run(run).close()
        with pytest.raises(
            RunEnds, match=r"\.lock was removed, and pid \d+ on .* trains there now"
        ):
            first.step()
    assert [path.name for path in checkpoints(run)] == ["step_000002"]


@pytest.mark.slow
def test_a_run_whose_folder_moved_away_ends_by_its_name(tmp_path: Path) -> None:
    """Its pool's snapshots are no names on the hub, and no second folder is begun."""
    folder = tmp_path / "run"
    begin_warm(folder, *RUNS["pool"])
    overrides = dict(word.split("=", 1) for word in (*RUNS["pool"], f"out={folder}"))
    overrides = {key: yaml.safe_load(value) for key, value in overrides.items()}
    with selfplay.start(str(write_tiny(folder)), overrides) as run:
        run.step()
        folder.rename(tmp_path / "moved")
        with pytest.raises(RunEnds, match=f"{folder} must stay in place during its run"):
            run.step()
    assert not folder.exists()


def test_a_finished_policy_is_not_trained_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints were deleted to save space; the same command has fewer steps."""
    shutil.rmtree(run / "checkpoints")
    weights, log = (run / "final" / "model.safetensors").read_bytes(), metrics_of(run)
    assert run_tiny(run, "steps=2") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"model.path={run / 'final'} starts from its policy" in said
    assert (run / "final" / "model.safetensors").read_bytes() == weights and metrics_of(run) == log
    shutil.rmtree(run / "final")
    assert run_tiny(run, "steps=2") == 2 and metrics_of(run) == log
    assert "delete metrics.jsonl to repeat the run" in capsys.readouterr().err


def test_a_run_that_never_saved_starts_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was ended in its first save."""
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "final")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"save_s"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: first + 1]))
    assert run_tiny(run, "steps=2") == 0 and len(metrics_of(run)) == 2
    assert (
        "holds no checkpoint: the run starts again from its first step" in capsys.readouterr().err
    )


def test_without_a_whole_checkpoint_the_run_ends(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not begin anew: a message, status 2, and no file changes."""
    older, newest = checkpoints(run)
    cut(older / STATE)
    (newest / "progress.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert run_tiny(run) == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: ") and said.count("\n") == 1
    assert "step_000004: progress.json is missing; step_000002: state/__0_0.distcp has" in said
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("part", ["tokenizer", "warm_start", "policy_pool/step_000000"])
def test_other_damaged_saves_end_the_run_with_their_name(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished(*RUNS["pool"]), tmp_path / "run")
    folder = tmp_path / "run" / part
    cut(folder / ("tokenizer.json" if part == "tokenizer" else "model.safetensors"))
    assert run_tiny(tmp_path / "run", *RUNS["pool"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(folder) in said and "bytes instead of" in said


@pytest.mark.slow
def test_what_a_killed_run_left_is_deleted(tmp_path: Path) -> None:
    """Folders half written, a folder moved away for its successor, and checkpoints that the killed
    run had no time to delete. What others keep in the run's folder stays."""
    run = tmp_path / "run"
    shutil.copytree(finished("save_every=1"), run)
    steps = (run / "checkpoints", "step_000009"), (run / "policy_pool", "step_000009")
    for place, name in ((run, "final"), *steps):
        place.mkdir(exist_ok=True)
        (place / f".partial-{name}").mkdir()
        (place / f".partial-{name}" / "file").touch()
    others = [run / ".partial-x", run / ".old-x", run / "x.new", run / "slurm-1.out"]
    for place in others:
        place.touch()
    (run / "final").rename(run / ".old-final")
    (run / "held_out_after.json.new").touch()
    oldest = checkpoints(run)[0]
    for step in (1, 2):
        copied = oldest.with_name(f"step_00000{step}")
        shutil.copytree(oldest, copied, dirs_exist_ok=True)
        record = json.loads((copied / "progress.json").read_text())
        (copied / "progress.json").write_text(json.dumps({**record, "step": step}))
    assert run_tiny(run, "save_every=1") == 0
    assert [path.name for path in checkpoints(run)] == ["step_000003", "step_000004"]
    left = [
        p for p in run.rglob("*") if p.name.startswith((".partial-", ".old-")) or p.suffix == ".new"
    ]
    assert sorted(left) == sorted(others[:3]) and others[3].exists()
    assert_same_run(finished("save_every=1"), run)


@pytest.mark.parametrize(("old", "new"), [(2, 9), (4, 1)])
def test_a_renamed_checkpoint_is_refused(
    old: int, new: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By training and by all that looks for a run's policy; its name would be believed."""
    home = run / "checkpoints"
    (home / f"step_{old:06d}").rename(home / f"step_{new:06d}")
    assert run_tiny(run) == 2
    said = capsys.readouterr().err
    rule = f"step_{new:06d} must be named by its step, got a checkpoint of step {old}; nearest: "
    assert rule in said and said.count("\n") == 1 and f"step_{old:06d}" in said
    with pytest.raises(SettingsError, match="must be named by its step"):
        find_source(run)


@pytest.mark.parametrize("text", ["", '{"step": "4"}'])
def test_a_checkpoint_without_a_readable_step_is_named(
    text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run / "final" / "progress.json"
    record.write_text(text)
    with pytest.raises(SettingsError, match=r"progress\.json must hold the number of finished"):
        find_source(run)
