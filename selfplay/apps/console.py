"""The observer that prints a run's steps in the terminal: lines under a head."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from selfplay.metrics.observer import Observer, Step

if TYPE_CHECKING:
    from selfplay.config import Config
    from selfplay.distributed import World

Line = Mapping[str, Any]  # of metrics.jsonl
Names = tuple[str, ...]  # of policies
# The columns of a step's line: heading, width, and the metric with its format; the others are made
# by `step_line`.
_COLUMNS = (
    ("score", 6, "score", ".3f"),
    ("eval", 6, "eval_score", ".3f"),
    ("reward", 12, "", ""),
    ("agree", 5, "agreement", ".2f"),
    ("msgs", 5, "messages", ".2f"),
    ("errors", 6, "errors", ".3f"),
    ("entropy", 7, "entropy", ".3f"),
    ("flat", 5, "zero_variance_groups", ".0%"),
    ("mismatch", 8, "", ""),
    ("left", 6, "", ""),
    ("tok/s", 6, "", ""),
)
_MISSING, _CLEAR = "-", "\x1b[K"  # the second clears the rest of a terminal's line
NUM_KEPT = 40  # lines of a run that stay, besides those of validations
MAX_SILENT_S = 60.0  # a line stays if the last one that did is this old
HEAD_EVERY = 25  # lines under a head
_WINDOW = 20  # steps whose mean time predicts the rest
_ENTROPY = [heading for heading, *_ in _COLUMNS].index("entropy")
_STAGES = ("play_s", "credit_s", "update_s", "push_s", "eval_s", "save_s")


class Console(Observer):
    """Prints steps on rank 0, under a head. A terminal shows each step's line until the next one;
    the lines that stay are every n-th, about NUM_KEPT of a run, the first, the last, those of steps
    with validation games, and one a minute. At the end it counts the steps without an update."""

    key = "console"

    def __init__(self, config: Config, world: World) -> None:
        """Predicts the time left of `config.steps` from the steps since the start or the resume."""
        super().__init__(config, world)
        self._steps: deque[float] = deque(maxlen=_WINDOW)  # seconds without validation and saving
        self._rare_s, self._num_steps = 0.0, 0
        self._num_kept, self._kept_at = 0, 0.0
        self._num_idle = self._last = 0

    def on_step(self, step: Step) -> None:
        """Print the line of metrics.jsonl, shortened."""
        idle = step.metrics.get("num_optimizer_steps") == 0
        self._num_idle += idle and "num_skipped_steps" not in step.metrics  # whose groups differ
        self._last = step.number
        if self.world.rank:
            return
        num, policies = self.config.steps, (*self.config.policies,)
        remaining_s = self.remaining_s(num - step.number, step.metrics)
        line = step_line(step.metrics, num_steps=num, remaining_s=remaining_s, policies=policies)
        stays = (
            self._num_steps == 1
            or step.number % max(1, num // NUM_KEPT) == 0
            or step.number == num
            or "eval_score" in step.metrics
            or time.monotonic() - self._kept_at >= MAX_SILENT_S
        )
        if stays:
            if self._num_kept % HEAD_EVERY == 0:
                print(head_line(num_steps=num, policies=policies))
            self._num_kept, self._kept_at = self._num_kept + 1, time.monotonic()
            print(f"{_CLEAR * sys.stdout.isatty()}{line}", flush=True)
        elif sys.stdout.isatty():
            # What is printed next overwrites it.
            print(f"{_CLEAR}{line[: get_terminal_size().columns - 1]}\r", end="", flush=True)

    def state(self) -> dict[str, Any]:
        """The number of steps without an update, for the end of a run that is resumed."""
        return {"num_idle": self._num_idle}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self._num_idle = state.get("num_idle", 0)

    def close(self) -> None:
        """Say how many of all steps made no update, if any."""
        if self._num_idle and not self.world.rank:
            print(f"{self._num_idle} of {self._last} steps made no update: all groups were equal")

    def remaining_s(self, num_steps: int, newest: Mapping[str, float]) -> float:
        """The predicted seconds of `num_steps` steps at the mean pace of the last ones, with
        validation and saving as often as so far; `newest` is the newest step's metrics."""
        rare_s = newest.get("eval_s", 0.0) + newest.get("save_s", 0.0)
        self._steps.append(newest["step_s"] - rare_s)
        self._rare_s, self._num_steps = self._rare_s + rare_s, self._num_steps + 1
        mean_s = sum(self._steps) / len(self._steps) + self._rare_s / self._num_steps
        return num_steps * mean_s


@cache
def _columns(policies: Names) -> tuple[tuple[str, int, str, str], ...]:
    """The columns; each of several policies has its own entropy, as a mean hides the collapse of
    one."""
    own = tuple((name := f"entropy/{each}", len(name), name, ".3f") for each in policies)
    return _COLUMNS[:_ENTROPY] + (own or (_COLUMNS[_ENTROPY],)) + _COLUMNS[_ENTROPY + 1 :]


def head_line(*, num_steps: int, policies: Names = ()) -> str:
    """The head above the lines of steps; each heading ends where its numbers end."""
    width = 2 * len(str(num_steps)) + 1
    heads = (name.rjust(size) for name, size, *_ in _columns(policies))
    return " ".join(["step".rjust(width), *heads])


def step_line(
    metrics: Line, *, num_steps: int, remaining_s: float | None = None, policies: Names = ()
) -> str:
    """The metrics of a step as one line under `head_line`, of at most 120 columns; with several
    policies, `policies`, no number is cut.

    Each number has its place, which is `-` for a missing one; the mismatch is the largest of the
    policies. Notes follow as far as they fit: whether there was no update, aborted games, each
    seat's mean reward if they differ, and the stages that took at least 5% of the step's time.
    """
    rate = metrics.get("tokens_per_s")
    apart = [n for name, n in metrics.items() if name.startswith("mismatch_mean") and n is not None]
    texts = {
        "reward": _reward(metrics),
        "mismatch": f"{max(apart):.0e}" if apart else None,
        "left": None if remaining_s is None else clock(remaining_s),
        "tok/s": None if rate is None else f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}",
    }
    cells = [f"{metrics['step']:>{len(str(num_steps))}}/{num_steps}"]
    for heading, width, metric, form in _columns(policies):
        if metric and metrics.get(metric) is not None:
            texts[heading] = f"{metrics[metric]:{form}}"
        cells.append((texts.get(heading) or _MISSING).rjust(width))
    notes = ["no update"] if metrics.get("num_optimizer_steps") == 0 else []
    if metrics.get("num_void"):
        notes.append(f"aborted {metrics['num_void']:.0f}")
    seats = [f"{mean:.2f}" for name, mean in metrics.items() if name.startswith("reward/")]
    if len(set(seats)) > 1:
        notes.append(f"seats {' '.join(seats)}")
    stages = {name.removesuffix("_s"): metrics[name] for name in _STAGES if name in metrics}
    total_s = sum(stages.values())
    notes += [f"{name} {s:.3g}s" for name, s in stages.items() if total_s and s >= 0.05 * total_s]
    while notes and len(" ".join([*cells, *notes])) > 120:
        notes.pop()
    return " ".join([*cells, *notes])[: None if policies else 120]


def _reward(metrics: Mapping[str, Any]) -> str | None:
    """The reward's mean and standard deviation, as in "0.652±0.20"."""
    if metrics.get("reward") is None:
        return None
    return f"{metrics['reward']:.3f}±{metrics['reward_std']:.2f}"


def clock(seconds: float) -> str:
    """Seconds as 4s, 3m05s or 2h07m."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
