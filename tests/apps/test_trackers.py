"""Each tracker, with its real library and no network: what it holds after a run and a resume."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfplay.advantages.advantages import CreditStats
from selfplay.apps.trackers import TensorBoard, WandB, game_row
from selfplay.config import Config
from selfplay.config.load import load
from selfplay.config.text import dump
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.metrics.observer import Step
from selfplay.metrics.observers import check_observers
from selfplay.metrics.records import game_text

SEATS = [
    {"player": "self", "system": "Rules", "user": "A: 3\n```"},
    {"player": "self", "system": "Rules", "user": "B: 4"},
]
GAME = {
    "step": 2,
    "instance": "train:7",
    "episode": 0,
    "score_norm": 0.75,
    "agreed": True,
    "ended": "finished",
    "seats": SEATS,
    "facts": {},
    "turns": [
        {"seat": 0, "text": "[message] \x1b[2J<script>", "error": None},
        {"seat": 1, "text": "[propose] x", "error": "not an assignment"},
    ],
}


KINDS = {"wandb": WandB, "tensorboard": TensorBoard}


def tracker_of(folder: Path, kind: str, *, rank: int = 0) -> WandB | TensorBoard:
    config = load(Config, folder / "config.yaml", [f"out={folder}"])
    return KINDS[kind](config, replace(init_world(device="cpu"), rank=rank))


def play(folder: Path, kind: str, steps: range, *, score: float, rank: int = 0) -> None:
    """Track these steps as a run does that continues before the first of them."""
    tracker = tracker_of(folder, kind, rank=rank)
    for step in steps:
        games = [GAME] if step == 2 else []
        line = {"step": step, "score": score + step, "score/pool:2/0": 0.5, "lost": float("nan")}
        tracker.step(step, line, games)
    tracker.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a_run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(load(Config, None, ["model.path=x", "seed=3"])))
    return folder


def test_a_game_is_a_row_with_its_outcome_and_its_text() -> None:
    row = game_row(GAME)
    assert (row["score"], row["agreed"], row["players"]) == (0.75, True, "self, self")
    assert row["game"] == game_text(GAME) and "\x1b" not in row["game"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_write_nothing(folder: Path, kind: str) -> None:
    before = sorted(folder.iterdir())
    play(folder, kind, range(1, 3), score=0.0, rank=1)
    assert sorted(folder.iterdir()) == before


def test_a_run_of_an_earlier_version_has_its_tracker_among_its_observers(folder: Path) -> None:
    path = folder / "config.yaml"
    for tracker, added in (("none", ()), ("wandb", ("wandb",))):
        path.write_text(f"track: {tracker}\nmodel: {{path: x}}\n")
        assert load(Config, path).observers == ("console", "page", *added)
    with pytest.raises(SettingsError, match=r"track is a name in observers, as in observers=\["):
        load(Config, None, ["track=wandb"])


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    config = load(Config, folder / "config.yaml", [f"observers=[{kind}]"])
    with pytest.raises(SettingsError, match=f"observers must not have {kind} .*track.txt"):
        check_observers(config, here=True)
    check_observers(load(Config, folder / "config.yaml"), here=True)


def test_wandb_online_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=r"got no key: run `wandb login`.*WANDB_MODE=offline"):
        WandB.ready(Config())
    WandB.ready(Config(), here=False)
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        WandB.ready(Config())
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    WandB.ready(Config())


def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = tracker_of(folder, "tensorboard")
    tracker.step(1, {"score": 1.0}, [])

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(tracker._run, "_add", fail)
    for step in (2, 3):
        tracker.step(step, {"score": 1.0}, [])
    tracker.close()
    assert capsys.readouterr().err.count("the disk is gone") == 1
    (folder / "tracker.json").write_text("[")
    monkeypatch.setenv("WANDB_MODE", "offline")
    play(folder, "wandb", range(1, 3), score=0.0)
    assert capsys.readouterr().err.count("continues without it") == 1


def test_tensorboard_shows_each_step_once_after_a_resume(folder: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    play(folder, "tensorboard", range(1, 5), score=0.0)
    play(folder, "tensorboard", range(2, 6), score=10.0)
    tracker = tracker_of(folder, "tensorboard")
    tracker.on_step(Step(6, [], [], {"score": 16.0}, CreditStats(0, 0), {}))
    tracker.close()
    scalars = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    scores = [(event.step, event.value) for event in scalars.Scalars("score")]
    assert scores == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0)]
    assert len(scalars.Scalars("score/pool:2/0")) == 5
    assert "lost" not in scalars.Tags()["scalars"], "it is not finite"
    shown = EventAccumulator(str(folder / "tensorboard")).Reload()
    (game,) = shown.Tensors("games")
    text = game.tensor_proto.string_val[0].decode()
    assert game.step == 2 and "B: 4" in text and "\x1b" not in text
    assert text.startswith("````text\n"), "the fence is longer than the one in a view"
    settings_text = shown.Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert "\n  group_size: " in settings_text and "\nseed: 3\n" in settings_text


def offline_records(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of all offline W&B runs under the folder, oldest first, by W&B's own reader."""
    files = folder.glob("wandb/offline-run-*/*.wandb")
    for path in sorted(files, key=lambda p: p.stat().st_mtime):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        yield from map(json.loads, told.splitlines())


def test_wandb_offline_goes_on_in_the_same_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "own")
    (folder / "report.html").write_text("the page")
    play(folder, "wandb", range(1, 5), score=0.0)
    saved = json.loads((folder / "tracker.json").read_text())
    play(folder, "wandb", range(3, 6), score=10.0)
    assert json.loads((folder / "tracker.json").read_text()) == saved | {"last_step": 5}
    wandb.teardown()  # its service may still be writing; it ends with the process otherwise
    records = list(offline_records(folder))
    runs = [record["run"] for record in records if record["type"] == "run"]
    assert {(run["run_id"], run["project"], run["display_name"]) for run in runs} == {
        (saved["id"], "own", "a_run")
    }
    for name in ("WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name)
    assert [*folder.glob("wandb/offline-run-*/files/report.html")], "the page goes with the run"
    told = [record["summary"]["update"] for record in records if record["type"] == "summary"]
    assert {each["page"] for each in told if "page" in each} == {str(folder / "report.html")}
    keys = runs[0]["config"]["update"]
    assert keys["seed"] == 3 and keys["rollout"]["group_size"] > 0
    logged = [record["history"]["item"] for record in records if record["type"] == "history"]
    scores = [(each["_step"], each["step"], each["score"]) for each in logged]
    assert scores == [(1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0), (4, 4, 4.0), (5, 5, 15.0)]
    assert [each.get("games.nrows") for each in logged] == [None, 1, None, None, None]
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/games*.json")
    shown = json.loads(table.read_text())
    assert [dict(zip(shown["columns"], row, strict=True)) for row in shown["data"]] == [
        game_row(GAME)
    ]


@pytest.mark.parametrize("switch", [("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")])
def test_wandb_that_is_switched_off_writes_nothing_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, switch: tuple[str, str]
) -> None:
    monkeypatch.setenv(*switch)
    play(folder, "wandb", range(1, 3), score=0.0)
    assert not [*folder.glob("wandb/*run-*")]


def test_wandbs_variables_name_the_run_and_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    given = {"MODE": "offline", "NAME": "mine", "RUN_ID": "abc", "DIR": str(tmp_path / "else")}
    for name, value in given.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    (tmp_path / "else").mkdir()
    play(folder, "wandb", range(1, 2), score=0.0)
    wandb.teardown()
    assert json.loads((folder / "tracker.json").read_text()) == {"id": "abc", "last_step": 1}
    runs = [one["run"] for one in offline_records(tmp_path / "else") if one["type"] == "run"]
    assert {(run["run_id"], run["display_name"]) for run in runs} == {("abc", "mine")}
