"""The report over methods: who stands beside whom, means over seeds, a figure for each."""

import json
from pathlib import Path

import pytest

from bench.methods_report import base_of, interval, main, methods_table, read_methods
from selfplay.config import load_config
from selfplay.config.settings import dump


def write_run(folder: Path, scores: list[float], *overrides: str) -> Path:
    """A finished run that began with half of each score and took one step of 2 s."""
    folder.mkdir()
    seed = folder.name.rpartition("_s")[2]
    words = ["model.scratch={}", "rollout.max_game_tokens=1000", f"seed={seed}", *overrides]
    (folder / "config.yaml").write_text(dump(load_config(None, words)))
    for stage, share in (("before", 0.5), ("after", 1.0)):
        own = [share * score for score in scores]
        measures = {"score": sum(own) / len(own), "agreement": share, "messages": 1.0, "errors": 0}
        found = {"sampled": {"scores": own, "measures": measures}}
        (folder / f"held_out_{stage}.json").write_text(json.dumps(found))
    step = {"step": 1, "step_s": 2.0, "zero_variance_groups": 0.25, "eval_score": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    few = "warm_start.num_games=5"
    return [
        write_run(tmp_path / "default_s0", [0.0, 1.0]),
        write_run(tmp_path / "default_s1", [0.5, 1.0]),
        write_run(tmp_path / "rloo_s0", [1.0, 1.0], "algorithm=rloo"),
        write_run(tmp_path / "rloo_replay_s0", [1.0, 1.0], "warm_start.auxiliary_weight=0.5"),
        write_run(tmp_path / "nothing_s0", [0.0, 0.0], few),
        write_run(tmp_path / "nothing_turn_s0", [0.0, 0.5], few, "algorithm.error_credit=turn"),
    ]


def test_each_method_stands_beside_what_began_as_it_did(folders: list[Path]) -> None:
    methods, left_out = read_methods(folders)
    assert left_out == []
    assert {name: base_of(name, methods, base="default") for name in methods} == {
        "default": None,
        "rloo": "default",
        "rloo_replay": "default",
        "nothing": None,
        "nothing_turn": "nothing",
    }
    lines = methods_table(methods, base="default").splitlines()[2:]
    names = [line.split("|")[1].strip() for line in lines]
    assert names == ["default", "rloo", "rloo_replay", "nothing", "nothing_turn"]


def test_numbers_are_means_over_seeds_and_the_interval_is_over_instances(
    folders: list[Path],
) -> None:
    methods, _ = read_methods(folders)
    mean, low, high = interval(methods["default"])
    assert (mean, low, high) == (0.625, 0.25, 1.0), "instances 0.25 and 1, two draws each"
    row = methods_table(methods, base="default").splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == ["2", "0.312", "0.625 [0.250, 1.000]", "0.500, 0.750"]
    assert cells[5:] == ["0.50 → 1.00", "1.00 → 1.00", "0.00 → 0.00", "- → -", "0.25", "2s"]


def test_a_figure_a_method_and_unfinished_runs_are_named(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ema_s0").mkdir()
    out = tmp_path / "figures"
    assert main([*map(str, folders), str(tmp_path / "ema_s0"), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "ema_s0 holds no finished run: it has no config.yaml" in said.err
    drawn = sorted(path.name for path in out.iterdir())
    assert drawn == ["method_nothing_turn.svg", "method_rloo.svg", "method_rloo_replay.svg"]
    assert all(f"({out}/{name})" in said.out for name in drawn)
    assert (out / "method_rloo.svg").read_text().count("<polyline") == 3
    assert main([str(tmp_path), "--out", str(out)]) == 2
    assert "must be named METHOD_sSEED" in capsys.readouterr().err
