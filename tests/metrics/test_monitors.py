"""Each default rule fires on what it is for and on no healthy run; stop saves before it ends."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfplay.advantages.sample import Sample
from selfplay.checkpoint import checkpoints
from selfplay.config.monitors import DEFAULT_MONITORS, parse_rule
from selfplay.learner.update import update_policy
from selfplay.metrics.monitors import GoBack, Monitors, MonitorStop, warnings_of
from tests.helpers.interrupted import replaced
from tests.helpers.tiny_run import (
    begin_halfway,
    finished,
    metrics_of,
    run_tiny,
    run_warm,
    same_weights,
)

HEALTHY = {
    "entropy": 0.024,
    "ratio_mean": 1.0,
    "score": 0.8,
    "honesty": 0.95,
    "messages": 0.69,
    "agreement": 0.96,
    "score/scripted:honest/0": 0.9,
    "num_optimizer_steps": 1.0,
    "void_share": 0.0,
}
# What goes wrong, and after how many such steps the mean over ten passes the bound of the default
# rule of this metric.
PROVOKED = {
    "entropy": (1e-6, 10),
    "ratio_mean": (9.0, 1),
    "score": (0.0, 10),
    "honesty": (0.5, 5),
    "messages": (0.04, 8),
    "agreement": (0.3, 8),
    "score/scripted:honest/0": (0.45, 5),
}
STOPPING = [rule.replace("warn if", "stop if") for rule in DEFAULT_MONITORS]
FALLS = "stop if eval_score/* falls 0.05 over 2 while eval_score rises"


def stopped(steps: Sequence[Mapping[str, float]], *rules: str) -> int | None:
    """The step, from 1, after which a rule stopped the run; None if none did."""
    monitors = Monitors(rules, rank=0)
    for step, metrics in enumerate(steps, 1):
        try:
            monitors.check(step, metrics)
        except MonitorStop:
            return step
    return None


def test_the_default_rules_watch_each_of_several_policies() -> None:
    """The mean of both would be 1."""
    collapsed = {"step": 1, "score": 0.5, "entropy/user": 2.0, "entropy/agent": 1e-6}
    drifted = {**collapsed, "entropy/agent": 1.0, "ratio_mean/user": 9.0, "ratio_mean/agent": 1.0}
    for line, named in ((collapsed, "entropy/agent"), (drifted, "ratio_mean/user")):
        (said,) = warnings_of(DEFAULT_MONITORS, [{**line, "step": n} for n in range(1, 11)])
        assert f"the mean of {named} over 10 steps is" in said


@pytest.mark.parametrize("metric", PROVOKED)
def test_a_default_rule_fires_on_what_it_is_for(
    metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, num = PROVOKED[metric]
    steps = [HEALTHY] * 20 + [HEALTHY | {metric: value}] * 20
    assert stopped(steps, *STOPPING) == 20 + num
    capsys.readouterr()  # rules of partners that this run has not
    assert stopped(steps, *DEFAULT_MONITORS) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert f", step {20 + num}: the mean of {metric} over 10 steps is " in line
    assert stopped(steps) is None


def test_a_rule_holds_beyond_its_bound_and_not_on_it() -> None:
    for rule, beyond in (("stop if score < 0.5", 0.25), ("stop if score > 0.5", 0.75)):
        assert stopped([{"score": 0.5}] * 12, rule) is None
        assert stopped([{"score": beyond}] * 12, rule) is not None


def test_void_games_are_warned_of_and_stop_a_run_where_they_are_most_of_three_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    void = [HEALTHY | {"void_share": share, "num_void": 16 * share} for share in (0.0, 0.875)]
    assert stopped([void[1], *[void[0]] * 9, void[1], void[0], void[0]], *DEFAULT_MONITORS) is None
    said = capsys.readouterr().err
    assert said.count("'warn if void_share > 0.1', step ") == said.count("(14 were aborted)") == 2
    assert stopped([*[void[0]] * 9, *[void[1]] * 9], *DEFAULT_MONITORS) == 11


def test_a_warning_comes_again_only_after_the_rule_did_not_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = [HEALTHY | {"score": 0.0}] * 10
    stopped([*silent, *silent, *[HEALTHY] * 10, *silent], *DEFAULT_MONITORS)
    assert capsys.readouterr().err.count("score < 0.001") == 2


def test_healthy_steps_fire_no_default_rule() -> None:
    """10,000 steps with the noise of the smallest batches: 16 games, 12 statements a step."""
    rng = random.Random(0)

    def mean(p: float, num: int) -> float:
        return sum(rng.random() < p for _ in range(num)) / num

    steps = [
        {
            "entropy": 0.024 * math.exp(rng.gauss(0, 0.3)),
            "ratio_mean": 1 + rng.gauss(0, 0.05),
            "score": mean(0.6, 16),
            "honesty": mean(0.95, 12),
            "messages": mean(0.4, 16),
            "agreement": mean(0.9, 16),
            "score/scripted:honest/0": mean(0.97, 16),
        }
        for _ in range(10_000)
    ]
    assert stopped(steps, *STOPPING) is None


def test_a_loss_is_measured_against_the_first_steps_and_not_the_best() -> None:
    """Messages may double and come back. At 0 from the start there is nothing to lose."""
    rule = "stop if messages loses 75% over 2"

    def steps(*values: float) -> list[dict[str, float]]:
        return [{"step": n, "messages": value} for n, value in enumerate(values, 1)]

    assert stopped(steps(0.4, 0.4, 0.8, 0.8, 0.15, 0.15), rule) is None
    # Means 0.4, 0.4, 0.24, 0.08: the last is below a quarter of the first.
    assert stopped(steps(0.4, 0.4, 0.4, 0.08, 0.08), rule) == 5
    assert stopped(steps(0, 0, 0, 0), rule) is None
    falling = steps(0.4, 0.4, 0.4, 0.08, 0.08, 0.0)
    (said,) = warnings_of([rule.replace("stop", "warn")], falling)
    assert said.endswith(
        "step 5: the mean of messages over 2 steps is 0.08, 80% below its first, 0.4"
    )
    (said,) = warnings_of([rule], falling)
    assert "stopped the run after step 5" in said


@pytest.mark.parametrize(
    ("alone", "paired", "step"),
    [
        # Both rise, both fall, or the fall is within the bound.
        ((0.5, 0.6, 0.7, 0.8), (0.5, 0.6, 0.7, 0.8), None),
        ((0.8, 0.6, 0.5, 0.4), (0.8, 0.6, 0.5, 0.4), None),
        ((0.5, 0.6, 0.7, 0.8), (0.50, 0.48, 0.46, 0.46), None),
        # Self-play rises and the score with the partner falls: means 0.5, 0.45, 0.35.
        ((0.5, 0.5, 0.6, 0.7), (0.5, 0.5, 0.4, 0.3), 4),
        # Both are compared with the best pair of means, which is the second.
        ((0.5, 0.9, 0.9, 0.8), (0.5, 0.8, 0.8, 0.6), None),
    ],
)
def test_a_score_that_falls_while_another_rises(
    alone: Sequence[float], paired: Sequence[float], step: int | None
) -> None:
    steps = [
        {"eval_score": a, "eval_score/warm_start": p} for a, p in zip(alone, paired, strict=True)
    ]
    assert stopped(steps, FALLS) == step


def test_restored_monitors_go_on_where_they_were() -> None:
    steps = [HEALTHY] * 15 + [HEALTHY | {"honesty": 0.5}] * 5
    first, second = (Monitors(STOPPING, rank=0) for _ in range(2))
    for step, metrics in enumerate(steps[:18], 1):
        first.check(step, metrics)
    second.restore(json.loads(json.dumps(first.state())))
    second.check(19, steps[18])
    with pytest.raises(MonitorStop, match=r"after step 20: .*honesty"):
        second.check(20, steps[19])


def test_a_metric_that_does_not_exist_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """One of evaluations at the first evaluation; default rules may lack theirs. With the metric
    the nearest, or all that several policies have of it, and what the rule then cannot do."""
    rules = ["stop if entropi < 1", "stop if eval_scor < 1 over 2", *DEFAULT_MONITORS]
    monitors = Monitors([*rules, "warn if lr < 1"], rank=0)
    monitors.check(1, HEALTHY | {"lr/user": 2.0, "lr/agent": 2.0})
    monitors.check(2, HEALTHY | {"eval_score": 0.9})
    monitors.check(3, HEALTHY | {"eval_score": 0.9})
    monitors.close()
    first, second, third = capsys.readouterr().err.splitlines()
    assert "entropi so far; nearest is entropy;" in first and "cannot stop the run" in first
    assert "lr so far; nearest is lr/user, lr/agent;" in second and "cannot warn" in second
    assert "eval_scor so far; nearest is eval_score;" in third


def test_a_rule_that_read_no_step_is_told_when_the_run_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No evaluation came and no observer gave a number. What was read before a resume is known,
    and a start that takes no step tells nothing. A metric of games is not near one of
    evaluations."""
    rules = ["stop if eval_score < 1", "warn if observed/lost > 2", "warn if score < 0.1"]
    run, resumed, finished_before = (Monitors(rules, rank=0) for _ in range(3))
    run.check(1, HEALTHY | {"eval_score": 2.0})
    resumed.restore(json.loads(json.dumps(run.state())))
    resumed.check(2, HEALTHY)
    assert not capsys.readouterr().err
    resumed.close()
    finished_before.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert "'warn if observed/lost > 2'" in said and "no metric is called observed/lost" in said
    run = Monitors(rules[:1], rank=0)
    run.check(1, HEALTHY)
    run.close()
    assert "no metric is called eval_score so far; without it" in capsys.readouterr().err


def test_a_metric_of_a_policy_that_rests_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """As one of a policy whose groups all had zero variance."""
    monitors = Monitors(["warn if entropy/agent < 0.1", "stop if lrr/agent < 1"], rank=0)
    user = HEALTHY | {"entropy/user": 1.0, "num_trained_tokens/user": 9.0}
    monitors.check(1, user | {"num_trained_tokens/agent": 0.0})
    assert not capsys.readouterr().err
    monitors.check(2, user | {"num_trained_tokens/agent": 9.0, "entropy/agent": 1.0})
    (said,) = capsys.readouterr().err.splitlines()
    assert "no metric is called lrr/agent so far" in said


def test_an_observers_metric_is_missed_once_observers_have_given_numbers_or_none_did_for_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An observer may give its numbers every few steps, here in the third."""
    right, wrong = "back to best if observed/lost rises 1", "stop if observed/losst > 2"
    some, none = Monitors([right, wrong], rank=0), Monitors([right], rank=0)
    for step in range(1, 10):
        numbers = {"observed/lost": 0.5} if step % 3 == 0 else {}
        some.check(step, HEALTHY | numbers)
    (said,) = capsys.readouterr().err.splitlines()
    assert wrong in said and "nearest is observed/lost" in said
    for step in range(1, 100):
        none.check(step, HEALTHY)
    (said,) = capsys.readouterr().err.splitlines()
    assert right in said and "no metric is called observed/lost" in said


@pytest.mark.parametrize(
    "rule",
    [
        "entropy < 0.05: stop",
        "warn if score > 1 over 0",
        "warn if score loses 100%",
        "warn if score > 1 while eval_score rises",
        "back if score falls 0.1",
        "warn if score rises 0.1 while eval_score rises",
    ],
)
def test_a_bad_rule_is_refused_with_an_example(rule: str) -> None:
    with pytest.raises(ValueError, match=r"^monitors: .*stop if entropy < 0.05 over 5") as error:
        parse_rule(rule)
    assert repr(rule) in str(error.value)


@pytest.mark.parametrize("rule", ["stop if score < 1e400", "warn if score falls 1e999 over 3"])
def test_a_rules_bound_is_finite(rule: str) -> None:
    with pytest.raises(ValueError, match=f"^monitors: a rule's bound must be .*'{rule}'"):
        parse_rule(rule)


def test_best_is_the_best_checkpoint_at_which_the_rule_did_not_hold() -> None:
    """Saved after every second step. Smaller is better where a rise is bad; equal means are both
    the best, and the newer one counts. A best that was not saved is not gone back to."""

    def went(rule: str, *values: float) -> tuple[int, int] | None:
        """The step after which the run goes back, and to which."""
        monitors = Monitors([rule], rank=0, saves=lambda step: step % 2 == 0)
        for step, value in enumerate(values, 1):
            try:
                monitors.check(step, {"x": value})
            except GoBack as back:
                return step, back.best
        return None

    assert went("back to best if x falls 0.3", 0.5, 0.6, 0.9, 0.8, 0.85, 0.5) == (6, 4)
    assert went("back to best if x rises 0.3", 0.5, 0.6, 0.1, 0.3, 0.25, 0.3, 0.45) == (7, 6)
    assert went("back to best if x > 0.7", 0.9, 0.6, 0.1, 0.5, 0.6, 0.8) == (6, 4)
    assert went("back to best if x < 0.3 over 2", 0.5, 0.4, 0.3, 0.2, 0.2) == (4, 2)
    assert went("back to best if x loses 50%", 1.0, 0.9, 0.9, 0.9, 0.4) == (5, 4)
    # The only save is of a step at which it held; the one after it did not save.
    assert went("back to best if x < 0.3", 0.5, 0.1, 0.4, 0.2, 0.1) is None


def test_a_best_is_kept_for_a_resume_and_the_means_start_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule, other = "back to best if x < 0.3 over 2", "warn if x < 0.2 over 3"
    values = (0.5, 0.5, 0.1, 0.1, 0.1, 0.1)
    first, second = (Monitors([rule, other], rank=0) for _ in range(2))
    for step, value in enumerate(values[:3], 1):
        first.check(step, {"x": value})
    assert first.state()["best"] == [2]
    second.restore(json.loads(json.dumps(first.state())))
    with pytest.raises(GoBack, match=r"step 4: .*goes back to step 2$"):
        second.check(4, {"x": values[3]})
    second.check(5, {"x": values[4]})  # one value since then
    with pytest.raises(GoBack, match=r"step 6: .*goes back to step 2$"):
        second.check(6, {"x": values[5]})
    assert not capsys.readouterr().err, "two values are not three"


def test_the_page_names_the_step_that_the_run_went_back_to() -> None:
    """From the lines alone, whatever was saved; a run without a checkpoint yet is warned."""
    rule = "back to best if x < 0.3"
    values = (0.9, 0.8, 0.1, 0.5)
    lines: list[dict[str, float]] = [{"step": n, "x": x} for n, x in enumerate(values, 1)]
    (said,) = warnings_of([rule], lines)
    assert said.endswith("the mean of x is 0.1; no checkpoint was better, so the run goes on")
    lines[2]["back_to"] = 2
    (said,) = warnings_of([rule], lines)
    assert said.endswith("the mean of x is 0.1; the policy goes back to step 2")


# --- in a run -----------------------------------------------------------------------------------


def poisoned(number: int) -> AbstractContextManager[None]:
    """In this step, from 1, one sample's advantages are not numbers."""

    def update(
        real: Callable[..., Any],
        learner: Any,
        samples: Sequence[Sample],
        *,
        step: int,
        **named: Any,
    ) -> Any:
        if step + 1 == number:
            nan = [math.nan * m for m in samples[0].mask]
            samples = [replace(samples[0], advantages=nan), *samples[1:]]
        return real(learner, samples, step=step, **named)

    return replaced(update_policy, update)


def test_a_loss_that_is_not_finite_stops_the_run_after_a_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights after the step are those before it, and a restart goes on with the next one."""
    folder = tmp_path / "run"
    begin_halfway(finished(), folder)
    with poisoned(3):
        assert run_tiny(folder) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "stopped the run after step 3: the mean of num_skipped_steps is 1 (the surr" in line
    assert "is nan" in line and "continues with step 4" in line
    assert checkpoints(folder)[-1].name == "step_000003"
    assert same_weights(*(c / "hf" for c in checkpoints(folder)[-2:]))
    assert run_tiny(folder) == 0
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4]


def test_a_rule_that_warns_leaves_the_optimizer_step_out_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two mini-batches one step of the two is taken."""
    words = ("monitors=[warn if num_skipped_steps > 0]", "algorithm.minibatches=2", "steps=2")
    with poisoned(1):
        run = run_warm(tmp_path / "run", *words)
    lines = metrics_of(run)
    assert [line["num_optimizer_steps"] for line in lines] == [1, 2]
    assert [line.get("num_skipped_steps") for line in lines] == [1, None]
    (warning,) = [x for x in capsys.readouterr().err.splitlines() if "num_skipped" in x]
    assert "step 1" in warning
