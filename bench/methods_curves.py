"""Compares methods over the same training steps: one table, and one figure per method.

    python -m bench.methods_curves runs/default_s0 runs/rloo_s0 … --steps 81 100 --out docs/figures

A run's folder must be named METHOD_sSEED. Only its metrics.jsonl is read, so the run need not be
finished. Figures are means over the training games of the given steps, with equal weight for each
run. A run with fewer steps is left out and reported. Each point of a curve is a mean of ten steps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from bench.compare_runs import row
from selfplay.apps.report.charts import curves_svg
from selfplay.atomic import write_atomically

Steps = list[dict[str, float]]  # a run's lines, in order
MEASURES = ("messages", "honesty", "errors", "zero_variance_groups", "entropy", "kl_reference")
HEADINGS = ("method", "seeds", "score", "lowest, highest seed", *MEASURES)
SMOOTHED = 10  # steps per point of a curve


def read_runs(
    folders: Sequence[Path], *, last: int
) -> tuple[dict[str, dict[str, Steps]], list[str]]:
    """Each method's runs by seed, cut after step `last`, and messages on runs with fewer steps.

    Raises:
        ValueError: for a folder that is not named METHOD_sSEED.
    """
    methods: dict[str, dict[str, Steps]] = {}
    short = []
    for folder in sorted(folders, key=lambda path: path.name):
        named = re.fullmatch(r"(.+)_s(\d+)", folder.name)
        if named is None:
            raise ValueError(f"a run's folder must be named METHOD_sSEED, got {folder.name}")
        path = folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if len(lines) < last:
            short.append(f"{folder.name} has {len(lines)} steps")
            continue
        methods.setdefault(named[1], {})[named[2]] = [json.loads(line) for line in lines[:last]]
    return methods, short


def table(methods: Mapping[str, Mapping[str, Steps]], *, first: int, base: str) -> str:
    """One row per method: the base first, then the others by falling score."""

    def score(name: str) -> list[float]:
        return [mean(steps, "score", first=first) for steps in methods[name].values()]

    def cells(name: str) -> list[str]:
        scores = score(name)
        shown = [name, str(len(scores)), f"{fmean(scores):.3f}"]
        shown.append(f"{min(scores):.3f}, {max(scores):.3f}")
        for measure in MEASURES:
            runs = methods[name].values()
            known = [s for s in runs if any(measure in line for line in s[first - 1 :])]
            means = [mean(steps, measure, first=first) for steps in known]
            shown.append(f"{fmean(means):.3f}" if means else "-")
        return shown

    order = sorted(methods, key=lambda name: (name != base, -fmean(score(name))))
    return "\n".join([row(HEADINGS), row(["---", *["--:"] * 9]), *(row(cells(n)) for n in order)])


def mean(steps: Steps, measure: str, *, first: int) -> float:
    """A measure's mean over the steps from number `first` on that have it."""
    return fmean(line[measure] for line in steps[first - 1 :] if measure in line)


def smoothed(steps: Steps) -> list[dict[str, float]]:
    """The mean score of each ten steps, placed at the last of them."""
    return [
        {"step": end, "score": fmean(line["score"] for line in steps[end - SMOOTHED : end])}
        for end in range(SMOOTHED, len(steps) + 1, SMOOTHED)
    ]


def write_figures(
    methods: Mapping[str, Mapping[str, Steps]], folder: Path, *, base: str
) -> list[str]:
    """Write one SVG per method that compares it with the base. Returns Markdown that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for method in methods:
        if method == base or base not in methods:
            continue
        curves, alike = {}, {}
        for name in (base, method):
            for seed, steps in methods[name].items():
                curves[f"{name}, seed {seed}"] = smoothed(steps)
                alike[f"{name}, seed {seed}"] = name
        path = folder / f"method_{method}.svg"
        title = f"{method} and {base}: score of training games"
        write_atomically(path, curves_svg(curves, y="score", title=title, alike=alike))
        shown.append(f"![{title}]({path.as_posix()})")
    return shown


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.methods_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--steps", nargs=2, type=int, default=(81, 100), metavar=("FIRST", "LAST"))
    parser.add_argument("--base", default="default", help="the method to compare the others with")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/figures"), help="folder for the figures"
    )
    args = parser.parse_args(words)
    first, last = args.steps
    if not 1 <= first <= last:
        parser.error(f"--steps must be 1 <= FIRST <= LAST, got {first} {last}")
    try:
        methods, short = read_runs(args.runs, last=last)
        figures = write_figures(methods, args.out, base=args.base)
    except (ValueError, OSError) as error:
        print(f"methods_curves: {error}", file=sys.stderr)
        return 2
    for reason in short:
        print(f"methods_curves: left out: {reason}, {last} are needed", file=sys.stderr)
    print(table(methods, first=first, base=args.base), *figures, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
