"""Monitors: rules over the numbers of metrics.jsonl that warn about a run, stop it or send it back.

docs/monitors.md lists the rules that are on by default, and the noise of healthy runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from dialop.specs import nearest
from selfplay.config.monitors import BACK, DEFAULT_MONITORS, Rule, parse_rule
from selfplay.errors import RunEnds
from selfplay.metrics.observer import Observer, Step
from selfplay.metrics.records import OBSERVED

_PATIENCE = 50  # steps until numbers of observers are missed
_DOES = {"warn": "warn", "stop": "stop the run", BACK: "send the run back"}


class MonitorStop(RunEnds):
    """A rule whose action is stop ended the run."""


class GoBack(Exception):
    """A rule sends the run back to the checkpoint of the step `best`."""

    def __init__(self, said: str, best: int) -> None:
        super().__init__(f"{said}; the policy goes back to step {best}")
        self.best = best


@dataclass(slots=True)
class _Series:
    """The values of one metric that a rule has read; the lists hold at most the rule's window."""

    values: list[float] = field(default_factory=list)
    rising: list[float] = field(default_factory=list)  # values of the metric that must rise, if any
    first: float | None = None  # the first mean over a full window
    best: float | None = None  # the best such mean
    rising_at_best: float = 0.0
    best_saved: float = 0.0  # of the means at checkpoints where the rule did not hold
    best_step: int = 0  # whose checkpoint that is; 0 if there is none
    holds: bool = False  # whether the rule held at the last value


class Monitors(Observer):
    """The rules of a run. Every rank calls with the same metrics and gets the same result."""

    key = "monitors"

    def __init__(
        self,
        rules: Sequence[str],
        *,
        rank: int,
        say: Callable[[str], object] | None = None,
        saves: Callable[[int], bool] = bool,
    ) -> None:
        """`say` gets each warning; None prints it to standard error. `saves` says whether a
        checkpoint is saved after a number of steps."""
        self._rules = [parse_rule(text) for text in rules]
        self._series: dict[tuple[str, str], _Series] = {}  # by the rule's text and the metric
        self._unmatched = [rule for rule in self._rules if rule.text not in DEFAULT_MONITORS]
        self._names = dict[str, float]()  # every metric so far
        self._rank, self._say, self._saves = rank, say or _print_warning, saves

    def on_step(self, step: Step) -> None:
        """Read the line of a step unless its push or validation games failed. If a rule sends the
        run back, add `back_to` to the line."""
        if not step.complete:
            return
        try:
            self.check(step.number, step.metrics, step.skipped)
        except GoBack as back:
            step.metrics["back_to"] = back.best
            self._warn(str(back))
            raise

    def check(self, step: int, metrics: Mapping[str, float], skipped: Sequence[str] = ()) -> None:
        """Read the metrics after `step` steps. `skipped` says why optimizer steps were skipped.

        A rule that warns prints a line when it starts to hold. Raises MonitorStop, after reading
        all metrics, for the first rule that holds and stops; else GoBack for the first one that
        sends the run back. All means then start anew, as their values were of another policy.
        """
        metrics = {"num_skipped_steps": 0.0, **metrics}  # it is logged only if it is above 0
        self._warn_of_unmatched(metrics, step)
        stops, backs = [], list[GoBack]()
        for rule in self._rules:
            for name in _matched(rule.metric, tuple(metrics)):
                problem = self._read(rule, name, metrics, step)
                if not problem:
                    continue
                if name == "num_skipped_steps" and skipped:
                    problem += f" ({skipped[0]})"
                if name in ("num_games", "void_share") and metrics.get("num_void"):
                    problem += f" ({metrics['num_void']:.0f} were aborted)"
                if rule.action == "stop":
                    stops.append(f"monitor '{rule.text}' stopped the run after step {step}: ")
                    stops[-1] += problem
                    continue
                said = f"monitor '{rule.text}', step {step}: {problem}"
                best = self._series[rule.text, name].best_step
                if rule.action == BACK and best:
                    backs.append(GoBack(said, best))
                else:
                    no = "; no checkpoint was better, so the run goes on"
                    self._warn(f"{said}{no if rule.action == BACK else ''}")
        if stops:
            raise MonitorStop(f"{stops[0]}; to continue, remove this rule from `monitors`")
        if backs:
            for series in self._series.values():
                series.values, series.rising, series.holds = [], [], False
            raise backs[0]

    def state(self) -> dict[str, Any]:
        """The monitors' part of the trainer state, as plain values for `restore`, and the steps of
        the checkpoints that a rule may go back to."""
        rules = {rule.text for rule in self._rules}
        best = {each.best_step for (text, _), each in self._series.items() if text in rules} - {0}
        series = [[*key, asdict(series)] for key, series in self._series.items()]
        return {"series": series} | ({"best": sorted(best)} if best else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Rules that are not in it start without values."""
        self._series = {(rule, n): _Series(**saved) for rule, n, saved in state.get("series", [])}
        read = {text for text, _ in self._series}
        self._unmatched = [rule for rule in self._unmatched if rule.text not in read]

    def _read(self, rule: Rule, name: str, metrics: Mapping[str, float], step: int) -> str:
        """Add the metric's value to the rule's series and return a new problem, "" for none."""
        value, rising = metrics[name], metrics.get(rule.rising or name, math.nan)
        if not (math.isfinite(value) and math.isfinite(rising)):
            return ""
        series = self._series.setdefault((rule.text, name), _Series())
        series.values = [*series.values, value][-rule.window :]
        series.rising = [*series.rising, rising][-rule.window :] if rule.rising else []
        if len(series.values) < rule.window:
            return ""
        mean, rising_mean = _mean(series.values), _mean(series.rising)
        series.first = mean if series.first is None else series.first
        if series.best is None or rule.better * (mean - series.best) >= 0:
            series.best, series.rising_at_best = mean, rising_mean
        held, series.holds = series.holds, _holds(rule, series, mean, rising_mean)
        may_return = rule.action == BACK and not series.holds and self._saves(step)
        if may_return and (not series.best_step or rule.better * (mean - series.best_saved) >= 0):
            series.best_saved, series.best_step = mean, step
        new = series.holds and (not held or rule.action == "stop")
        return _problem(rule, series, name) if new else ""

    def close(self) -> None:
        """Warn about the user's rules that no step of the run could read.

        Those with a metric of evaluations or of observers may wait until here. A start that takes
        no step does not know the run's metrics, and says nothing.
        """
        if self._names:  # else every step was taken before
            self._warn_of_unmatched(self._names)

    def _warn_of_unmatched(self, metrics: Mapping[str, float], step: float = math.inf) -> None:
        """Warn once about a user's rule that matches no metric of the run, as soon as the line has
        metrics of its kind: `_may_come` says which ones may come later."""
        self._names |= metrics
        for rule in list(self._unmatched):
            if step == math.inf or not _may_come(rule.metric, metrics, step):
                self._unmatched.remove(rule)
                self._warn_of(rule, self._names)

    def _warn_of(self, rule: Rule, names: Mapping[str, float]) -> None:
        """Warn if the rule's metrics are not among the run's `names`, with the nearest, or all that
        several policies have of it."""
        for metric in filter(None, (rule.metric, rule.rising)):
            if not _matched(metric, tuple(names)):
                kind = [n for n in names if n.startswith("eval_") == metric.startswith("eval_")]
                own = [name for name in kind if name.startswith(f"{metric}/")]
                near = f"; nearest is {', '.join(own)}" if own else nearest(metric, kind)
                self._warn(
                    f"monitor '{rule.text}': no metric is called {metric} so far{near}; without it "
                    f"the rule cannot {_DOES[rule.action]}"
                )

    def _warn(self, text: str) -> None:
        """Say a warning on the first rank only."""
        if self._rank == 0:
            self._say(text)


@lru_cache(maxsize=256)
def _matched(pattern: str, names: tuple[str, ...]) -> list[str]:
    """The names that a rule's metric matches; the lines of a run have few sets of names."""
    return [name for name in names if fnmatchcase(name, pattern)]


def _may_come(metric: str, metrics: Mapping[str, float], step: float) -> bool:
    """Whether a later line may have a metric that this one lacks: one of evaluations, of observers,
    which may give numbers every few steps, or of a policy that did not train in this step."""
    for first, patience in (("eval_", math.inf), (OBSERVED, _PATIENCE)):
        if metric.startswith(first):
            return step < patience and not any(name.startswith(first) for name in metrics)
    _, slash, policy = metric.partition("/")
    return metrics.get(f"num_trained_tokens{slash}{policy}", 1.0) == 0.0


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def warnings_of(rules: Sequence[str], steps: Iterable[Mapping[str, float]]) -> list[str]:
    """The rules' warnings for the lines of a run's metrics.jsonl, until one stops the run."""
    said: list[str] = []
    steps = list(steps)
    best = {line["back_to"] for line in steps if "back_to" in line}  # the saves that matter
    monitors = Monitors(rules, rank=0, say=said.append, saves=best.__contains__)
    for line in steps:
        try:
            monitors.check(int(line["step"]), line)
        except MonitorStop as stop:
            return [*said, str(stop)]
        except GoBack as back:
            said.append(str(back))
    return said


def _problem(rule: Rule, series: _Series, name: str) -> str:
    """What holds of the metric `name`, in words."""
    mean, over = _mean(series.values), f" over {rule.window} steps" if rule.window > 1 else ""
    problem = f"the mean of {name}{over} is {mean:.4g}"
    assert series.first is not None and series.best is not None
    if rule.relation == "loses":
        problem += f", {1 - mean / series.first:.0%} below its first, {series.first:.4g}"
    if rule.relation in ("falls", "rises"):
        where = "below" if rule.better > 0 else "above"
        problem += f", {abs(series.best - mean):.4g} {where} its best"
    if rule.rising:
        went = f"{series.rising_at_best:.4g} to {_mean(series.rising):.4g}"
        problem += f", {rule.rising} went from {went}"
    return problem


def _holds(rule: Rule, series: _Series, mean: float, rising_mean: float) -> bool:
    """Whether a rule holds for the mean of its window: below or above a bound, or lower by it than
    the first mean, or worse by it than the best one."""
    if rule.relation == "<":
        return mean < rule.bound
    if rule.relation == ">":
        return mean > rule.bound
    assert series.best is not None and series.first is not None
    if rule.relation == "loses":
        return series.first > 0 and mean < series.first * (1 - rule.bound)
    falls = rule.better * (series.best - mean) > rule.bound
    return falls and (rule.rising is None or rising_mean > series.rising_at_best)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
