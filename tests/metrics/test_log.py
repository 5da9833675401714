"""A run's folder and its logs: nothing twice, nothing torn, nothing that JSON cannot hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from selfplay.config import Config, WandbConfig
from selfplay.config.settings import SettingsError, load
from selfplay.metrics.bootstrap import bootstrap_interval, show_interval
from selfplay.metrics.log import StepLog, Stopwatch, Wandb, clock, open_run, progress, step_line

SCRATCH = ["model.scratch={}", "rollout.max_game_tokens=512"]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_a_run_folder_tells_settings_and_code(tmp_path: Path) -> None:
    config, folder = load(Config, None, SCRATCH), tmp_path / "runs" / "a"
    assert open_run(folder, config) is False
    assert load(Config, folder / "config.yaml") == config
    code = (folder / "code.txt").read_text()
    assert "commit " in code and "torch " in code and "python " in code
    assert open_run(folder, config) is True
    assert (folder / "code.txt").read_text().count("started ") == 2


def test_a_run_goes_on_longer_but_not_with_other_settings(tmp_path: Path) -> None:
    open_run(tmp_path, load(Config, None, SCRATCH))
    assert open_run(tmp_path, load(Config, None, [*SCRATCH, "steps=999"])) is True
    assert load(Config, tmp_path / "config.yaml").steps == 999
    with pytest.raises(SettingsError, match=r"rollout\.group_size: 8 -> 4; give the saved ones"):
        open_run(tmp_path, load(Config, None, [*SCRATCH, "rollout.group_size=4", "steps=5"]))
    assert load(Config, tmp_path / "config.yaml").steps == 999


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    config = load(Config, None, SCRATCH)
    assert open_run(tmp_path / "run", config, rank=1) is False
    log = StepLog(tmp_path / "metrics.jsonl", after_step=None, rank=1)
    log.append({"step": 1})
    log.close()
    Wandb(tmp_path, WandbConfig(mode="online"), config, rank=1).log({"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_no_step_stands_twice_after_going_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path, after_step=None)
    for step in range(1, 6):
        log.append({"step": step, "text": "a\u2028b\x85c \ud800"})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "torn": ')
    log = StepLog(path, after_step=3)
    log.append({"step": 4})
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[0]["text"] == "a\u2028b\x85c \ud800"
    log.close()
    StepLog(path, after_step=None).close()
    assert lines(path) == []


def test_a_line_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path, after_step=None)
    log.append(
        {
            "step": 1,
            "loss": float("nan"),
            "norm": np.float32("inf"),
            "kinds": {"a": [1.5, -float("inf")]},
            "count": np.int64(3),
            "pair": (1, None),
        }
    )
    assert lines(path) == [
        {
            "step": 1,
            "loss": None,
            "norm": None,
            "kinds": {"a": [1.5, None]},
            "count": 3,
            "pair": [1, None],
            "non_finite": ["loss", "norm", "kinds.a[1]"],
        }
    ]
    with pytest.raises(ValueError, match="needs an integer step, got None"):
        log.append({"score": 1.0})


def test_the_line_of_a_step_fits_a_terminal() -> None:
    metrics = {
        "step": 999, "score": 0.98765, "agreement": 0.99, "messages": 12.345, "errors": 10.5,
        "entropy": 10.25, "mismatch_mean": 1.2e-5, "tokens_per_s": 123_456.0, "play_s": 123.4,
        "update_s": 123.4, "push_s": 13.3, "log_s": 1.2,
    }  # fmt: skip
    line = step_line(metrics, num_steps=1000, remaining_s=7640.0)
    assert {"999/1000", "0.988", "0.99", "12.3", "10.5", "10.2", "123k", "2h07m"} <= set(
        line.split()
    )
    assert len(line) <= 120
    assert len(step_line(metrics, num_steps=10**9, remaining_s=1e9)) <= 120
    small = {"step": 3, "score": 0.5, "tokens_per_s": 321.0, "play_s": 1.0, "entropy": None}
    assert "ent" not in step_line(small, num_steps=200, remaining_s=185.0)
    assert clock(4.4) == "4s"


def test_a_stopwatch_adds_up_stages_and_knows_the_rest() -> None:
    watch = Stopwatch()
    assert watch.remaining_s(3) is None
    for _ in range(2):
        with watch("play"):
            pass
    with pytest.raises(RuntimeError), watch("update"):
        raise RuntimeError
    seconds = watch.lap()
    assert list(seconds) == ["play_s", "update_s", "step_s"]
    assert 0 < seconds["play_s"] + seconds["update_s"] <= seconds["step_s"]
    assert watch.remaining_s(3) == pytest.approx(3 * seconds["step_s"])
    assert list(watch.lap()) == ["step_s"]


def test_void_games_show_in_the_line_of_a_step() -> None:
    assert "void 3" in step_line({"step": 1, "score": 0.5, "num_void": 3.0}, num_steps=2)
    assert "void" not in step_line({"step": 1, "score": 0.5, "num_void": 0.0}, num_steps=2)


def test_progress_without_a_terminal_prints_lines_only_when_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert list(progress(range(5), "short")) == [0, 1, 2, 3, 4]
    with progress(100, "play") as bar:
        bar.delay = 0
        bar.start_t -= 40
        bar.last_print_t -= 40
        bar.update(50)
    told = capsys.readouterr().err
    assert "play 50/100" in told and told.count("00:40") == 2 and told.count("\n") == 1


def test_wandb_is_asked_for_by_name_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = load(Config, None, SCRATCH)
    Wandb(tmp_path, WandbConfig(mode="off"), config).log({"step": 1})
    with pytest.raises(SettingsError, match=r"wandb\.mode=offline needs the wandb package"):
        Wandb(tmp_path, WandbConfig(mode="offline"), config)
    with pytest.raises(SettingsError, match="needs the wandb package"):
        open_run(tmp_path / "run", load(Config, None, [*SCRATCH, "wandb.mode=online"]))
    assert not (tmp_path / "run").exists()


def test_the_bootstrap_interval_of_a_coin_is_that_of_the_normal_law() -> None:
    flips = [0.0, 1.0] * 200
    mean, low, high = bootstrap_interval(flips, seed=1)
    # 400 fair flips: standard error 0.5 / 20 = 0.025, so the interval is 0.5 -/+ 1.96 * 0.025.
    assert mean == 0.5
    assert low == pytest.approx(0.451, abs=0.004)
    assert high == pytest.approx(0.549, abs=0.004)
    assert bootstrap_interval(flips, seed=1) == (mean, low, high)
    assert bootstrap_interval([0.7], seed=0) == pytest.approx((0.7, 0.7, 0.7))
    with pytest.raises(ValueError, match="at least 1 value"):
        bootstrap_interval([], seed=0)


def test_figures_read_as_in_the_reports() -> None:
    assert show_interval((0.9124, 0.9, 0.92)) == "0.912 [0.900, 0.920]"
