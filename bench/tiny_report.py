"""The figures of several finished runs as one Markdown passage: seeds and their controls.

    python -m bench.tiny_report runs/tiny runs/tiny_seed1 runs/tiny_control --name tiny

Reads what each run left in its folder, prints the table of before and after, the learning curves
(written as SVG into docs/figures/) and one game before and after. Plays nothing. Scores are shares
of the best possible value, other measures are means a game.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfplay.config import Config, load_config
from selfplay.config.settings import SettingsError, difference
from selfplay.evaluation.drawings import drift_svg, game_text, learning_curve_svg
from selfplay.evaluation.report import fenced
from selfplay.games import kit_of
from selfplay.metrics.bootstrap import show_interval
from selfplay.metrics.log import clock, write_atomically

# Metric, the name of its figure, its title.
CURVES = (
    ("eval_score", "score", "Score on held-out games"),
    ("eval_messages", "messages", "Messages a held-out game"),
)
# Measures of the table, those that the game has.
SAID = ("messages", "words", "errors", "honesty", "questions", "interactivity")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its settings, its held-out games before and after, its metrics by step."""

    label: str
    config: Config
    before: dict[str, Any]
    after: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def is_control(self) -> bool:
        return not self.config.game.messages


def read_run(folder: Path) -> Run:
    """Raises ValueError for a folder that holds no finished run, with the file it lacks."""
    names = ("config.yaml", "held_out_before.json", "held_out_after.json", "metrics.jsonl")
    paths = [folder / name for name in names]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{folder} holds no finished run: it has no {path.name}")
    config = load_config(paths[0])
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in paths[1:3])
    lines = paths[3].read_text(encoding="utf-8").split("\n")
    label = f"{'talk' if config.game.messages else 'no messages'}, seed {config.seed}"
    return Run(label, config, before, after, [json.loads(line) for line in lines if line])


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, talking ones first, each with a label of its own.

    Raises:
        ValueError: for runs that were held to different held-out games.
    """
    runs = [read_run(folder) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        other = difference(held_to(runs[0].config), held_to(run.config))
        if other:
            raise ValueError(
                f"{folder} and {folders[0]} played different held-out games: {other[0]}"
            )
    labels = [run.label for run in runs]
    runs = [
        replace(run, label=f"{run.label} ({folder.name})") if labels.count(run.label) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]
    return sorted(runs, key=lambda run: run.is_control)


def held_to(config: Config) -> Config:
    """The settings that decide which held-out games a run plays; all others at their defaults."""
    game = replace(config.game, messages=True)
    return Config(game=game, eval=replace(Config().eval, final_games=config.eval.final_games))


def results_table(runs: Sequence[Run]) -> str:
    """One row a run: sampling as in training unless a heading says greedy. "Apart" says whether the
    interval after lies above the one before."""
    said = [m for m in SAID if any(m in r.after["sampled"]["measures"] for r in runs)]
    headings = (
        "run",
        "score before [95 %]",
        "score after [95 %]",
        "rise",
        "apart",
        "greedy score",
        "greedy agreement",
        *said,
        "self-play",
    )
    lines = [row(headings), row(["---", *["--:"] * (len(headings) - 1)])]
    for run in runs:
        before, after = run.before["sampled"], run.after["sampled"]
        greedy = run.after["greedy"]
        arrows = [f"{_mean(before, measure)} → {_mean(after, measure)}" for measure in said]
        cells = [
            run.label,
            show_interval(before["interval"]),
            show_interval(after["interval"]),
            f"{after['interval'][0] - before['interval'][0]:+.3f}",
            "yes" if after["interval"][1] > before["interval"][2] else "no",
            f"{greedy['interval'][0]:.3f}",
            f"{greedy['measures']['agreement']:.3f}",
            *arrows,
            clock(sum(step.get("step_s", 0.0) for step in run.steps)),
        ]
        lines.append(row(cells))
    return "\n".join(lines)


def baselines(runs: Sequence[Run]) -> str:
    """How to read the table, and the scripted players' scores on the same instances."""
    after, scripts = runs[0].after, kit_of(runs[0].config.game).BASELINES
    shown = [f"{name} {show_interval(after[name]['interval'])}" for name in scripts]
    num_games = len(after["sampled"]["scores"])
    return (
        "Sampled as in training unless greedy is said; apart: the interval after lies above the "
        "one before; what is said and refused: a game, before → after. "
        f"Scripted players on the same {num_games:,} instances: {', '.join(shown)}."
    )


def curve_rows(run: Run) -> list[dict[str, Any]]:
    """The run's evaluations by step. Step 0 is the held-out evaluation before self-play, for a run
    evaluates on its validation games only after its first steps."""
    start = {f"eval_{name}": value for name, value in run.before["sampled"]["measures"].items()}
    return [{"step": 0, **start}, *(step for step in run.steps if "eval_score" in step)]


def write_curves(runs: Sequence[Run], folder: Path, *, name: str) -> list[str]:
    """Write one SVG a curve; returns the Markdown that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for metric, word, title in CURVES:
        rows = {run.label: curve_rows(run) for run in runs}
        path = folder / f"{name}_{word}.svg"
        write_atomically(path, learning_curve_svg(rows, y=metric, title=title))
        shown.append(f"![{title}]({path.as_posix()})")
    for number, run in enumerate(runs):
        seen = [
            (step["step"], step["eval_score"], step["eval_drift_score"])
            for step in run.steps
            if "eval_drift_score" in step
        ]
        if seen:
            path = folder / f"{name}_guard_{number}.svg"
            write_atomically(path, drift_svg(seen, partner=run.config.eval.drift_monitor.partner))
            shown.append(f"![{run.label}: its guard]({path.as_posix()})")
    return shown


def one_game(run: Run) -> str:
    """Of the held-out games that were kept in full, the first that gained most, before and
    after."""
    before = {game["instance"]: game for game in run.before["sampled"]["games"]}
    pairs = [
        (before[game["instance"]], game)
        for game in run.after["sampled"]["games"]
        if game["instance"] in before
    ]
    first, last = max(pairs, key=lambda pair: pair[1]["score_norm"] - pair[0]["score_norm"])
    return "\n".join(
        [
            f"Of the first {len(pairs)} held-out games ({run.label}), the one that gained most.",
            "Before self-play:",
            "",
            fenced(game_text(first)),
            "",
            "After self-play:",
            "",
            fenced(game_text(last)),
        ]
    )


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(row: dict[str, Any], measure: str) -> str:
    """A mean with two decimals; a dash where nothing was there to measure."""
    return f"{row['measures'][measure]:.2f}" if measure in row["measures"] else "-"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiny_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a finished run's folder")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="where figures go")
    parser.add_argument("--name", default="tiny", help="how the figures' file names begin")
    asked = parser.parse_args(words)
    try:
        runs = read_runs(asked.runs)
        figures = write_curves(runs, asked.out, name=asked.name)
    except (SettingsError, ValueError, OSError) as error:
        print(f"tiny_report: {error}", file=sys.stderr)
        return 2
    parts = [results_table(runs), baselines(runs), *figures, one_game(runs[0])]
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
