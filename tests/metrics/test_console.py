"""What a person reads: the line of a step and progress."""

import sys

import pytest

from selfplay.config import Config
from selfplay.distributed import init_world
from selfplay.metrics.console import LEGEND, Console, progress, step_line


def test_a_validation_counts_in_the_rest_as_often_as_it_came() -> None:
    """Steps take 1 s each; one validation of 60 s, in the 20th of 30 steps, is 2 s a step."""
    console = Console(Config(), init_world(device="cpu"))
    for step in range(30):
        rare = {"eval_s": 60.0} if step == 19 else {}
        left_s = console.remaining_s(10, {"step_s": 1.0 + rare.get("eval_s", 0.0), **rare})
    assert left_s == pytest.approx(10 * (1.0 + 2.0))


def test_the_line_of_a_step_has_its_numbers_and_fits_a_terminal() -> None:
    metrics = {
        "step": 999, "score": 0.98765, "agreement": 0.99, "messages": 12.345, "errors": 10.5,
        "entropy": 10.25, "mismatch_mean": 1.2e-5, "tokens_per_s": 123_456.0, "play_s": 123.4,
        "update_s": 123.4, "push_s": 13.3, "log_s": 1.2,
    }  # fmt: skip
    line = step_line(metrics, num_steps=1000, remaining_s=7640.0)
    words = {"999/1000", "0.988", "0.99", "12.35", "10.500", "10.250", "123.5k", "2h07m"}
    assert words <= {*line.split()} and max(len(line), len(LEGEND)) <= 120
    small = {"step": 3, "score": 0.5, "tokens_per_s": 321.0, "play_s": 1.0, "entropy": None}
    seats = {"reward": 0.4375, "reward_std": 0.73, "reward/0": 1.0, "reward/1": -0.125}
    idle = {"num_optimizer_steps": 0.0, "zero_variance_groups": 1.0}
    line = step_line(small | seats | idle | {"eval_score": 0.25}, num_steps=200)
    assert all(one in line for one in ("no update", "0.438±0.73 (1.00 -0.12)", "eval 0.250"))
    assert "no update" not in step_line(small, num_steps=200)


def test_progress_without_a_terminal_prints_lines_only_when_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert list(progress(range(5), "short")) == [0, 1, 2, 3, 4]
    for at_once in (False, True):
        with progress(100, "play", at_once=at_once) as bar:
            bar.delay = 0
            bar.start_t -= 40
            bar.last_print_t -= 40
            bar.update(50)
    assert capsys.readouterr().err.splitlines() == [
        "play 50/100, 00:40 gone, 00:40 left",
        "play 50/100, 00:40 gone",
    ]
