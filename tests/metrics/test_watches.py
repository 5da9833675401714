"""Each watch is passed by what it watches for and by no healthy run; stop saves before it ends."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfplay import step as step_verbs
from selfplay.advantages.sample import Sample
from selfplay.checkpoint import checkpoints
from selfplay.config import WatchConfig
from selfplay.metrics.watches import Watches, WatchStop
from tests.helpers.tiny_run import begin_warm, finished, metrics_of, run_tiny, same_weights

HEALTHY = {
    "entropy": 0.024,
    "ratio_mean": 1.0,
    "score": 0.8,
    "honesty": 0.95,
    "score/scripted:honest/0": 0.9,
    "num_optimizer_steps": 1.0,
}
# What goes wrong, and after how many such steps the mean over ten passes its threshold.
PROVOKED = {
    "entropy": ({"entropy": 1e-6}, 10),
    "ratio": ({"ratio_mean": 9.0}, 1),
    "score": ({"score": 0.0}, 10),
    "honesty": ({"honesty": 0.5}, 5),
    "partner": ({"score/scripted:honest/0": 0.45}, 5),
}


def watched(steps: Sequence[Mapping[str, float]], **settings: Any) -> int | None:
    """The step that a watch stopped, from 1; None if none did."""
    watches = Watches(WatchConfig(**settings), rank=0)
    for step, metrics in enumerate(steps, 1):
        try:
            watches.check(step, metrics)
        except WatchStop:
            return step
    return None


@pytest.mark.parametrize("watch", PROVOKED)
def test_a_watch_is_passed_by_what_it_watches_for(
    watch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, num = PROVOKED[watch]
    steps = [HEALTHY] * 20 + [HEALTHY | change] * 20
    assert watched(steps, **{watch: "stop"}) == 20 + num
    assert watched(steps, **{watch: "off"}) is None
    assert not capsys.readouterr().err
    assert watched(steps) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: watch.{watch}, step {20 + num}: ")


def test_a_warning_comes_again_only_after_the_mean_was_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = [HEALTHY | {"score": 0.0}] * 10
    watched([*silent, *silent, *[HEALTHY] * 10, *silent])
    assert capsys.readouterr().err.count("watch.score") == 2


def test_healthy_steps_pass_no_watch() -> None:
    """10,000 steps with the noise of the smallest batches: 16 games, 12 statements a step. With all
    actions at stop none ends the run."""
    rng = random.Random(0)
    every = dict.fromkeys(PROVOKED, "stop")

    def share(p: float, num: int) -> float:
        return sum(rng.random() < p for _ in range(num)) / num

    steps = [
        {
            "entropy": 0.024 * math.exp(rng.gauss(0, 0.3)),
            "ratio_mean": 1 + rng.gauss(0, 0.05),
            "score": share(0.6, 16),
            "honesty": share(0.95, 12),
            "score/scripted:honest/0": share(0.97, 16),
        }
        for _ in range(10_000)
    ]
    assert watched(steps, **every) is None


def test_a_restored_watch_goes_on_where_it_was() -> None:
    steps = [HEALTHY] * 15 + [HEALTHY | {"honesty": 0.5}] * 5
    config = WatchConfig(honesty="stop")
    first, second = Watches(config, rank=0), Watches(config, rank=0)
    for step, metrics in enumerate(steps[:18], 1):
        first.check(step, metrics)
    second.restore(first.state())
    second.check(19, steps[18])
    with pytest.raises(WatchStop, match="after step 20"):
        second.check(20, steps[19])


# --- in a run -----------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Steps, from 1, in which one sample's advantages are not numbers."""
    steps: set[int] = set()
    real, num = step_verbs.update_policy, [0]

    def update(
        learner: Any, samples: Sequence[Sample], *words: Any, step: int, **named: Any
    ) -> Any:
        num[0] += 1
        if step + 1 in steps:
            first = samples[0]
            nan = [math.nan * m for m in first.mask]
            samples = [replace(first, advantages=nan), *samples[1:]]
        return real(learner, samples, *words, step=step, **named)

    monkeypatch.setattr(step_verbs, "update_policy", update)
    return steps


def test_a_loss_that_is_not_finite_stops_the_run_after_a_save(
    tmp_path: Path, poisoned: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights after the step are those before it, and a restart goes on with the next one."""
    folder = tmp_path / "run"
    begin_warm(folder)
    poisoned.add(3)
    assert run_tiny(folder) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("train.py: watch.non_finite stopped the run after step 3: the surrogate")
    assert "is nan" in told and "goes on with step 4" in told
    assert checkpoints(folder)[-1].name == "step_000003"
    assert same_weights(*(c / "hf" for c in checkpoints(folder)[-2:]))
    poisoned.clear()
    assert run_tiny(folder) == 0
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4]


def test_skip_leaves_the_optimizer_step_out_and_goes_on(
    tmp_path: Path, poisoned: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """With two mini-batches one step of the two is taken."""
    folder, words = tmp_path / "run", ("watch.non_finite=skip", "algorithm.minibatches=2")
    begin_warm(folder)
    poisoned.add(2)
    assert run_tiny(folder, *words) == 0
    lines = metrics_of(folder)
    assert [line["num_optimizer_steps"] for line in lines] == [2, 1, 2, 2]
    assert [line.get("num_skipped_steps") for line in lines] == [None, 1, None, None]
    warnings = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning: watch")]
    assert len(warnings) == 1 and "step 2" in warnings[0]


def test_skipping_for_ever_ends_the_run(
    tmp_path: Path, poisoned: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    begin_warm(tmp_path / "run")
    poisoned.update({2, 3, 4})
    assert run_tiny(tmp_path / "run", "watch.non_finite=skip", "watch.window=2") == 1
    assert "in 2 steps in a row none was" in capsys.readouterr().err


def test_a_watch_stops_a_run_after_a_save_and_another_action_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entropy of a tiny run is below 50 nats in every window. The restarted run, whose watches
    warn, ends as one without watches."""
    folder = tmp_path / "run"
    begin_warm(folder)
    words = ("watch.min_entropy=50", "watch.window=3")
    assert run_tiny(folder, *words, "watch.entropy=stop") == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "watch.entropy stopped the run after step 3" in told and "goes on with step 4" in told
    assert checkpoints(folder)[-1].name == "step_000003"
    assert run_tiny(folder, *words) == 0
    assert metrics_of(folder) == metrics_of(finished())
