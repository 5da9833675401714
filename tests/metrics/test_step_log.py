"""The step logs: no step twice, no line cut off, every number valid JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from selfplay.advantages.advantages import CreditStats
from selfplay.errors import SettingsError
from selfplay.metrics.observer import Step
from selfplay.metrics.step_log import Journal, StepLog, Stopwatch, check_logs
from selfplay.rollout.episode import Episode
from selfplay.step.ending import finish_checkpoint
from tests.helpers.hand_episodes import episode


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_a_resumed_log_holds_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path, after_step=None)
    for step in range(1, 6):
        log.append({"step": step, "text": "a\u2028b\x85c \ud800"})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "cut_off": ')
    log = StepLog(path, after_step=3)
    log.append({"step": 4})
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[0]["text"] == "a\u2028b\x85c \ud800"
    log.close()
    StepLog(path, after_step=None).close()
    assert lines(path) == []


HARMS: dict[str, Callable[[list[str]], list[str]]] = {
    "doubled": lambda lines: lines * 2,
    "one twice": lambda lines: [*lines[:2], *lines[1:]],
    "reversed": lambda lines: lines[::-1],
    "one missing": lambda lines: [*lines[:1], *lines[2:]],
    "the first missing": lambda lines: lines[1:],
    "the last missing": lambda lines: lines[:-1],
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "games.jsonl", "groups.jsonl"])
def test_a_log_holds_each_line_of_the_steps_before_once_in_order(
    name: str, harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or a run does not go on with it. The log may be moved: one line says so, each time until a
    checkpoint has counted what is left."""
    written = [f'{{"step": {step}}}\n' for step in range(1, 6)]
    path, counts = tmp_path / name, {name: 4}
    path.write_text("".join(written))
    check_logs(tmp_path, after_step=4, num_lines=counts)
    path.write_text("".join(HARMS[harm](written[:4])))
    before = path.read_text()
    with pytest.raises(SettingsError, match=r"must (have|hold) .*, got .* to resume in this fold"):
        check_logs(tmp_path, after_step=4, num_lines=counts)
    if name == "metrics.jsonl":  # a line a step needs no count, which old checkpoints lack
        with pytest.raises(SettingsError, match=r"must (have|hold)"):
            StepLog(path, after_step=4)
    assert path.read_text() == before
    path.unlink()
    log = StepLog(path, after_step=4, num=4)
    assert f"{path} holds no line of the finished steps 1 to 4" in capsys.readouterr().err
    log.append({"step": 5})
    log.close()
    again = StepLog(path, after_step=5, num=log.num_lines)
    again.close()
    assert again.num_lines == 1 and not capsys.readouterr().err


def test_a_line_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path, after_step=None)
    line = {"step": 1, "loss": float("nan"), "norm": np.float32("inf"), "count": np.int64(3)}
    log.append({**line, "kinds": {"a": [1.5, -float("inf")]}, "pair": (1, None)})
    told = {"step": 1, "loss": None, "norm": None, "count": 3, "kinds": {"a": [1.5, None]}}
    told |= {"pair": [1, None], "non_finite": ["loss", "norm"]}
    assert lines(path) == [told]
    with pytest.raises(ValueError, match="step"):
        log.append({"score": 1.0})


def step_of(number: int, episodes: list[Episode], **metrics: float) -> Step:
    return Step(number, episodes, [], {"step": number, **metrics}, CreditStats(0, 0), {})


def test_a_stopwatch_adds_up_stages() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("play"):
            pass
    with pytest.raises(RuntimeError), watch("update"):
        raise RuntimeError
    seconds = watch.lap()
    assert list(seconds) == ["play_s", "update_s", "step_s"]
    assert 0 < seconds["play_s"] + seconds["update_s"] <= seconds["step_s"]
    assert list(watch.lap()) == ["step_s"]


def test_one_game_of_n_is_logged_whatever_comes_in_turn(tmp_path: Path) -> None:
    """Four groups of eight games a step, of eight: a fixed one of eight would always be a group's
    first, where the policy with a partner has seat 0."""
    journal = Journal(tmp_path, log_games_every=8, after_step=0, rank=0)
    games = [episode((1.0, 1.0), number % 8, instance=f"{number // 8}") for number in range(32)]
    for step in range(1, 51):
        journal.on_step(step_of(step, games))
    journal.close()
    logged = [(line["step"], line["instance"]) for line in lines(tmp_path / "games.jsonl")]
    assert logged == [(step, f"{group}") for step in range(1, 51) for group in range(4)]
    first = [line["episode"] == 0 for line in lines(tmp_path / "games.jsonl")]
    odd = [line["episode"] % 2 for line in lines(tmp_path / "games.jsonl")]
    assert 0.05 < sum(first) / 200 < 0.25 and 0.35 < sum(odd) / 200 < 0.65


def test_a_checkpoint_is_complete_after_the_disk_holds_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no step without one waits for the disk."""
    order: list[str] = []

    def recorded(handle: int) -> None:
        order.append(Path(f"/proc/self/fd/{handle}").readlink().name)

    monkeypatch.setattr("os.fsync", recorded)
    journal = Journal(tmp_path, log_games_every=1, after_step=0, rank=0)
    order.clear()
    journal.on_step(step_of(1, [episode((1.0, 1.0), 0)]))
    run: Any = SimpleNamespace(
        timed=Stopwatch(), journal=journal, config=SimpleNamespace(keep_checkpoints=1)
    )
    saved: Any = SimpleNamespace(finish=lambda state, keep: order.append("checkpoint"))
    finish_checkpoint(run, saved, {})
    assert order == ["metrics.jsonl", "games.jsonl", "groups.jsonl", "checkpoint"]
    journal.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_journal_writes_each_step_on_rank_0_alone(rank: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path, log_games_every=1, after_step=0, rank=rank)
    journal.on_step(step_of(1, [], score=0.5))
    journal.close()
    if rank:
        assert list(tmp_path.iterdir()) == []
    else:
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "score": 0.5}]
