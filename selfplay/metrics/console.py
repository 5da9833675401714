"""The output of a run in the terminal: one line per step, and progress bars."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from selfplay.metrics.observer import Observer, Step

if TYPE_CHECKING:
    from selfplay.config import Config
    from selfplay.distributed import World

# The columns of a step's line: the metric, its label, the format of the number.
_COLUMNS = (
    ("score", "score", ".3f"),
    ("agreement", "agree", ".2f"),
    ("messages", "msgs", ".2f"),
    ("errors", "err", ".3f"),
    ("entropy", "ent", ".3f"),
    ("mismatch_mean", "mismatch", ".0e"),
)
LEGEND = (
    "steps: score, eval (validation), reward ± spread (of each seat), agreement, messages, errors, "
    "entropy, mismatch, times"
)
_WINDOW = 20  # steps whose mean time predicts the rest
_STAGES = ("play_s", "credit_s", "update_s", "push_s", "eval_s", "save_s")


class Console(Observer):
    """Prints each step's line on rank 0, and a legend before the first one."""

    def __init__(self, config: Config, world: World) -> None:
        """Predicts the time left of `config.steps` from the steps since the start or the resume."""
        super().__init__(config, world)
        self._steps: deque[float] = deque(maxlen=_WINDOW)  # seconds without validation and saving
        self._rare_s, self._num_steps = 0.0, 0

    def on_step(self, step: Step) -> None:
        """Print the line of metrics.jsonl, shortened."""
        if self.world.rank:
            return
        if not self._num_steps:
            print(LEGEND)
        num = self.config.steps
        remaining_s = self.remaining_s(num - step.number, step.metrics)
        print(step_line(step.metrics, num_steps=num, remaining_s=remaining_s), flush=True)

    def remaining_s(self, num_steps: int, newest: Mapping[str, float]) -> float:
        """The predicted seconds of `num_steps` steps at the mean pace of the last ones, with
        validation and saving as often as so far; `newest` is the newest step's metrics."""
        rare_s = newest.get("eval_s", 0.0) + newest.get("save_s", 0.0)
        self._steps.append(newest["step_s"] - rare_s)
        self._rare_s, self._num_steps = self._rare_s + rare_s, self._num_steps + 1
        mean_s = sum(self._steps) / len(self._steps) + self._rare_s / self._num_steps
        return num_steps * mean_s


def step_line(
    metrics: Mapping[str, Any], *, num_steps: int, remaining_s: float | None = None
) -> str:
    """The metrics of a step as one line of at most 120 columns.

    Usual numbers have the same width, so the lines of a run align in columns. Missing metrics are
    left out, and so are stages that took less than 5% of the step's time. A line that is too long
    loses its last parts.
    """
    parts = [f"{metrics['step']:>{len(str(num_steps))}}/{num_steps}"]
    for name, label, form in _COLUMNS:
        if metrics.get(name) is not None:
            parts.append(f"{label} {metrics[name]:{form}}")
        if name == "score" and metrics.get("eval_score") is not None:
            parts.append(f"eval {metrics['eval_score']:.3f}")
        if name == "score" and metrics.get("reward") is not None:
            parts.append(_reward(metrics))
    if metrics.get("num_optimizer_steps") == 0:
        equal = metrics.get("zero_variance_groups") == 1
        parts.append("no update: groups equal" if equal else "no update")
    if remaining_s is not None:
        parts.append(f"{clock(remaining_s):>6} left")
    if metrics.get("num_void"):
        parts.append(f"void {metrics['num_void']:.0f}")
    if metrics.get("tokens_per_s") is not None:
        rate = metrics["tokens_per_s"]
        parts.append(f"{rate / 1000:5.1f}k tok/s" if rate >= 1000 else f"{rate:6.0f} tok/s")
    stages = {name.removesuffix("_s"): metrics[name] for name in _STAGES if name in metrics}
    total_s = sum(stages.values())
    if total_s > 0:
        parts += [f"{name} {s:.3g}s" for name, s in stages.items() if s >= 0.05 * total_s]
    while len(" ".join(parts)) > 120:
        parts.pop()
    return " ".join(parts)


def _reward(metrics: Mapping[str, Any]) -> str:
    """The reward's mean and standard deviation, as in "reward 0.652±0.20 (0.72 0.58)": in brackets
    the mean of each seat if they differ."""
    seats = [f"{m:.2f}" for name, m in metrics.items() if name.startswith("reward/")]
    text = f"reward {metrics['reward']:.3f}±{metrics['reward_std']:.2f}"
    return f"{text} ({' '.join(seats)})" if len(set(seats)) > 1 else text


def clock(seconds: float) -> str:
    """Seconds as 4s, 3m05s or 2h07m."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"


def progress(
    items: Iterable[Any] | int, label: str, *, rank: int = 0, at_once: bool = False
) -> tqdm[Any]:
    """A progress bar with the remaining time, on standard error; ranks above 0 show none. Items
    processed `at_once` end together, so the first ones do not predict the remaining time.

    Iterate over it, or pass a count as `items` and call `bar.update(k)` inside
    `with progress(count, …) as bar:`. Without a terminal it prints a line at most every ten
    seconds, and none in the first ten.
    """
    iterable, total = (None, items) if isinstance(items, int) else (items, None)
    if rank or sys.stderr.isatty():
        form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}" if at_once else None
        return tqdm(
            iterable,
            label,
            total,
            leave=False,
            dynamic_ncols=True,
            disable=bool(rank),
            bar_format=form,
        )
    left = "" if at_once else ", {remaining} left"
    form = f"{{desc}} {{n_fmt}}/{{total_fmt}}, {{elapsed}} gone{left}{{postfix}}"
    return _Lines(
        iterable, label, total, leave=False, bar_format=form, mininterval=10, miniters=1, delay=10
    )


class _Lines(tqdm):  # type: ignore[type-arg, unused-ignore]
    """Progress as separate lines, for an output that is not a terminal."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()
