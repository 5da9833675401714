"""Watches over a run's training steps: entropy, ratios, score, honesty, fixed partners, and loss or
gradients that are not finite. docs/watches.md lists the thresholds and the noise of healthy runs.

A watch reads the mean of its metric over the last `watch.window` steps that have it. It warns when
the mean passes its threshold, and again only after the mean has recovered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from selfplay.config.player_spec import CHECKPOINT, ENDPOINT, SCRIPTED
from selfplay.config.watches import WatchConfig
from selfplay.errors import RunEnds

# Prefixes of the metrics that are scores with fixed partners.
_FIXED = tuple(f"score/{kind}:" for kind in (SCRIPTED, CHECKPOINT, ENDPOINT))


class WatchStop(RunEnds):
    """A watch whose action is stop ended the run."""


class Watches:
    """The watches of a run. Every rank calls with the same metrics and gets the same verdict."""

    def __init__(self, config: WatchConfig, *, rank: int) -> None:
        self._config, self._rank = config, rank
        self._recent: dict[str, list[float]] = {}  # by metric, newest last
        self._best: dict[str, float] = {}  # the largest mean over a window
        self._passed: set[str] = set()
        self._num_skipped = 0  # steps in a row without an optimizer step

    def check(
        self, step: int, metrics: Mapping[str, float], *, skipped: Sequence[str] = ()
    ) -> None:
        """Read the metrics after `step` steps. `skipped` says why optimizer steps of this step
        were skipped.

        Raises WatchStop, after reading all metrics, if one passes the threshold of a watch whose
        action is stop.
        """
        config = self._config
        problems = [*self._non_finite(metrics, skipped)]
        passed = set()
        for watch, name, value in _watched(metrics):
            mean = self._add(name, value)
            if mean is None or getattr(config, watch) == "off":
                continue
            problem = self._problem(watch, name, mean)
            if problem:
                passed.add(name)
                action = getattr(config, watch)
                if action == "stop" or name not in self._passed:
                    problems.append((watch, problem, action))
        self._passed = passed
        for watch, problem, action in problems:
            if action != "stop" and self._rank == 0:
                print(f"warning: watch.{watch}, step {step}: {problem}", file=sys.stderr)
        for watch, problem, action in problems:
            if action == "stop":
                other = "skip" if watch == "non_finite" else "warn"
                raise WatchStop(
                    f"watch.{watch} stopped the run after step {step}: {problem}; "
                    f"watch.{watch}={other} goes on"
                )

    def state(self) -> dict[str, Any]:
        """The part of the trainer state that `restore` takes, as plain values."""
        return {
            "recent": {name: list(values) for name, values in self._recent.items()},
            "best": dict(self._best),
            "passed": sorted(self._passed),
            "num_skipped": self._num_skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent = {name: list(values) for name, values in state.get("recent", {}).items()}
        self._best = dict(state.get("best", {}))
        self._passed = set(state.get("passed", []))
        self._num_skipped = int(state.get("num_skipped", 0))

    def _add(self, name: str, value: float) -> float | None:
        """The mean over the last window with this value; None before a window is full."""
        recent = [*self._recent.get(name, []), value][-self._config.window :]
        self._recent[name] = recent
        if len(recent) < self._config.window:
            return None
        mean = sum(recent) / len(recent)
        self._best[name] = max(mean, self._best.get(name, mean))
        return mean

    def _problem(self, watch: str, name: str, mean: float) -> str:
        """How this mean passes the watch's threshold; "" if it does not."""
        config, fall = self._config, self._best[name] - mean
        key, bound, beyond = {
            "entropy": ("min_entropy", config.min_entropy, mean < config.min_entropy),
            "ratio": ("max_ratio_gap", config.max_ratio_gap, mean > config.max_ratio_gap),
            "score": ("min_score", config.min_score, mean <= config.min_score),
            "honesty": (
                "max_honesty_fall",
                config.max_honesty_fall,
                fall > config.max_honesty_fall,
            ),
            "partner": (
                "max_partner_fall",
                config.max_partner_fall,
                fall > config.max_partner_fall,
            ),
        }[watch]
        if not beyond:
            return ""
        what = f"|{name} - 1|" if watch == "ratio" else name
        below = f", {fall:.4g} below its best" if watch in ("honesty", "partner") else ""
        return (
            f"the mean of {what} over {config.window} steps is {mean:.4g}{below}, "
            f"watch.{key} is {bound:g}"
        )

    def _non_finite(
        self, metrics: Mapping[str, float], skipped: Sequence[str]
    ) -> Iterator[tuple[str, str, str]]:
        none_taken = bool(skipped) and not metrics.get("num_optimizer_steps")
        self._num_skipped = self._num_skipped + 1 if none_taken else 0
        if skipped:
            problem = f"{skipped[0]}; optimizer steps not taken: {len(skipped)}"
            for_ever = self._num_skipped >= self._config.window
            if for_ever:
                problem += f", in {self._num_skipped} steps in a row none was"
            yield "non_finite", problem, "stop" if for_ever else self._config.non_finite


def _watched(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """(watch, metric, value) for each of the step's metrics that a watch reads."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            continue
        if name in ("entropy", "score", "honesty"):
            yield name, name, value
        elif name == "ratio_mean":
            yield "ratio", name, abs(value - 1.0)
        elif name.startswith(_FIXED):
            yield "partner", name, value
