"""Compares finished runs of several methods: one table, and one figure per method with its base.

    python -m bench.methods_report runs/default_s0 runs/default_s1 runs/rloo_s0 … --out docs/figures

A run's folder must be named METHOD_sSEED. A method is compared with its base. This is --base if
both start from the same game, model and warm start; else it is the method with the longest name
that, with an underscore, begins this method's name (`nothing` for `nothing_turn`). Scores are
shares of the best possible value, other measures are means per game.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from bench.tiny_report import Run, curve_rows, held_to, read_run, row
from selfplay.config.settings import SettingsError, difference
from selfplay.evaluation.drawings import learning_curve_svg
from selfplay.metrics.console import clock
from selfplay.metrics.tables import bootstrap_interval, show_interval
from selfplay.whole import write_atomically

Runs = dict[str, list[Run]]  # method name: its runs, sorted by folder name
HEADINGS = (
    "method",
    "seeds",
    "score before",
    "score after [95 %]",
    "lowest, highest seed",
    "agreement",
    "messages",
    "errors",
    "true statements",
    "zero-variance groups",
    "seconds a run",
)


def read_methods(folders: Sequence[Path]) -> tuple[Runs, list[str]]:
    """The runs by method, sorted by name, and the reasons why folders were left out.

    Raises:
        ValueError: for a folder that is not named METHOD_sSEED, or runs of one method that were
            evaluated on different held-out games.
    """
    methods: Runs = {}
    left_out = []
    for folder in sorted(folders, key=lambda path: path.name):
        named = re.fullmatch(r"(.+)_s(\d+)", folder.name)
        if named is None:
            raise ValueError(f"a run's folder must be named METHOD_sSEED, got {folder.name}")
        try:
            run = read_run(folder)
        except ValueError as error:
            left_out.append(str(error))
            continue
        runs = methods.setdefault(named[1], [])
        if runs and (other := difference(held_to(runs[0].config), held_to(run.config))):
            raise ValueError(f"{folder} played other held-out games than its method: {other[0]}")
        runs.append(run)
    return methods, left_out


def base_of(method: str, methods: Runs, *, base: str) -> str | None:
    """The method that this one is compared with; None for a base itself.

    It is `base` if both have the same start, else the method whose name begins this one's.
    """
    if method == base:
        return None
    if base in methods and _start(methods[base]) == _start(methods[method]):
        return base
    prefixes = [name for name in methods if method.startswith(f"{name}_")]
    return max(prefixes, key=len) if prefixes else None


def methods_table(methods: Runs, *, base: str) -> str:
    """One row per method, each base above the methods that are compared with it."""
    lines = [row(HEADINGS), row(["---", *["--:"] * (len(HEADINGS) - 1)])]
    order = sorted(methods, key=lambda name: _place(name, methods, base=base))
    return "\n".join([*lines, *(row(_cells(name, methods[name])) for name in order)])


def interval(runs: Sequence[Run]) -> tuple[float, float, float]:
    """The runs' mean score after self-play, with its bootstrap interval.

    The bootstrap is over instances, of which each counts with its mean score over the seeds.
    """
    scores = [run.after["sampled"]["scores"] for run in runs]
    return bootstrap_interval([fmean(by_seed) for by_seed in zip(*scores, strict=True)], seed=0)


def write_figures(methods: Runs, folder: Path, *, base: str) -> list[str]:
    """Write one SVG per method, its runs in one colour and its base's in another.

    Returns Markdown that shows them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for method, runs in methods.items():
        own_base = base_of(method, methods, base=base)
        if own_base is None:
            continue
        curves = {
            f"{name}, seed {run.config.seed}": (name, run)
            for name, runs_of_name in ((own_base, methods[own_base]), (method, runs))
            for run in runs_of_name
        }
        path = folder / f"method_{method}.svg"
        title = f"{method} and {own_base}: score on validation games"
        drawing = learning_curve_svg(
            {label: curve_rows(run) for label, (_, run) in curves.items()},
            y="eval_score",
            title=title,
            alike={label: name for label, (name, _) in curves.items()},
        )
        write_atomically(path, drawing)
        shown.append(f"![{title}]({path.as_posix()})")
    return shown


def _start(runs: Sequence[Run]) -> tuple[object, ...]:
    """The settings that decide the policy before self-play, without the auxiliary imitation loss,
    which acts only during self-play."""
    config = runs[0].config
    return config.game, config.model, replace(config.warm_start, auxiliary_weight=0.0)


def _place(name: str, methods: Runs, *, base: str) -> tuple[bool, str, bool, str]:
    """The sort key of a row: methods with the base `base` first, each base before its methods."""
    first = base_of(name, methods, base=base) or name
    return first != base, first, name != first, name


def _cells(name: str, runs: Sequence[Run]) -> list[str]:
    after = [fmean(run.after["sampled"]["scores"]) for run in runs]
    before = [fmean(run.before["sampled"]["scores"]) for run in runs]
    flat = [step["zero_variance_groups"] for run in runs for step in run.steps]
    seconds = fmean(sum(step.get("step_s", 0.0) for step in run.steps) for run in runs)
    return [
        name,
        str(len(runs)),
        f"{fmean(before):.3f}",
        show_interval(interval(runs)),
        f"{min(after):.3f}, {max(after):.3f}",
        *(_change(runs, name) for name in ("agreement", "messages", "errors", "honesty")),
        f"{fmean(flat):.2f}" if flat else "-",
        clock(seconds),
    ]


def _change(runs: Sequence[Run], measure: str) -> str:
    """A measure's mean over the seeds, before and after; a dash if no run has it."""
    shown = []
    for held_out in ([run.before for run in runs], [run.after for run in runs]):
        rows: list[Mapping[str, float]] = [result["sampled"]["measures"] for result in held_out]
        values = [measures[measure] for measures in rows if measure in measures]
        shown.append(f"{fmean(values):.2f}" if values else "-")
    return " → ".join(shown)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.methods_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--base", default="default", help="the method to compare the others with")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/figures"), help="folder for the figures"
    )
    args = parser.parse_args(words)
    try:
        methods, left_out = read_methods(args.runs)
        figures = write_figures(methods, args.out, base=args.base)
    except (SettingsError, ValueError, OSError) as error:
        print(f"methods_report: {error}", file=sys.stderr)
        return 2
    for reason in left_out:
        print(f"methods_report: left out: {reason}", file=sys.stderr)
    print("\n\n".join([methods_table(methods, base=args.base), *figures]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
