"""Compares finished runs in Markdown: runs with different seeds, and their controls.

    python -m bench.compare_runs runs/talk runs/talk_seed1 runs/talk_control --name talk

Reads the run folders. Prints a table of results before and after self-play, with the mean and the
worst of several seeds of each method; what another method than the first run's changes, seed by
seed; the commits that ran; with --name links to the learning curves (written as SVG to
docs/figures/); training games by parts of the run; and `--games` games before and after. Scores are
shares of the best possible value, other measures are means per game.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from dialop.shown import fenced, on_one_line
from selfplay.apps.console import clock
from selfplay.apps.report.charts import COLOURS, svg_of
from selfplay.atomic import write_atomically
from selfplay.config import Config
from selfplay.config.load import load
from selfplay.config.text import changed, difference, plain
from selfplay.errors import SettingsError
from selfplay.evaluation.rows import SCRIPT, Row, one_game, read_rows
from selfplay.evaluation.tables import (
    COLUMNS,
    FEW_STATEMENTS,
    TALK_EFFECT,
    columns_of,
    effect_cell,
    measure_cells,
    paired_change,
    show_change,
    show_interval,
    silent_text,
)
from selfplay.metrics.records import game_text

# Metric, name of its figure, title.
CURVES = (
    ("eval_score", "score", "Score on validation games"),
    ("eval_messages", "messages", "Messages a validation game"),
    ("eval_searches", "searches", "Searches a validation game"),
)
# Metrics of training games.
CURVE_OF_TRAINING = (
    *("score", "agreement", "errors", "messages", "words", "honesty", "entropy", "kl_reference"),
    *("play_s", "update_s", "step_s"),
)
# The settings that define a method: runs with different ones are not averaged. The first weights do
# not count: two methods may start from one warm start.
METHOD = (
    *("steps", "algorithm", "reward", "rollout", "optim", "methods", "policy_pool"),
    *("data.train", "data.start", "data.options"),
    *("model.scratch", "model.dtype", "model.chat_template", "model.lora"),
)
# Measures that the table leaves out; it has all others, including a game's own.
NOT_SHOWN = ("agreement", "score_if_agreed", "optimal", "turns", "tokens", "user_words")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: settings, held-out results before and after, metrics of each step, and the
    code that ran according to `code.txt`: the commits, and the sha256 of each custom function, by
    its key and name, and of each module that it imports.
    `label` is the folder's name until `read_runs` names all runs; `method` comes from
    `method_of`."""

    label: str
    method: str
    config: Config
    code: tuple[str, ...]
    own_code: dict[str, str]
    before: dict[str, Row]
    after: dict[str, Row]
    steps: list[dict[str, Any]]

    @property
    def is_control(self) -> bool:
        return not plain(self.config.game.options).get("messages", True)


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises ValueError if the run is not finished; names the missing file."""
    names = ("config.yaml", "held_out_before.json", "held_out_after.json", "metrics.jsonl")
    paths = [folder / name for name in names]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{folder} is not a finished run: it has no {path.name}")
    config = load(Config, paths[0], code="none")  # with the names of one's own files as given
    before, after = (read_rows(json.loads(path.read_text("utf-8"))) for path in paths[1:3])
    if "sampled" not in before or "sampled" not in after:
        raise ValueError(f"{folder}: a script named sampled replaces the policy")
    if not one_game([*before.values(), *after.values()]):
        raise ValueError(f"{folder}: its game's code changed between the held-out games")
    lines = paths[3].read_text(encoding="utf-8").split("\n")
    code = folder / "code.txt"
    told = code.read_text("utf-8").splitlines() if code.exists() else []
    commits = tuple(line for line in told if line.startswith("commit "))
    found = (line.rpartition(" sha256 ") for line in told)
    digests = {what: digest for what, _, digest in found if what}
    of_steps = (json.loads(line) for line in lines if line)
    steps = [{n: value for n, value in step.items() if value is not None} for step in of_steps]
    return Run(folder.name, "", config, commits, digests, before, after, steps)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, each with a unique label; those with messages come first.

    Raises:
        ValueError: for runs that were evaluated on different held-out games.
    """
    runs = [read_run(folder) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        other = difference(held_to(runs[0].config), held_to(run.config))
        if other:
            raise ValueError(
                f"{folder} and {folders[0]} played different held-out games: {other[0]}"
            )
    runs = [replace(run, method=method_of(run, runs[0])) for run in runs]
    names = [f"{run.method}, seed {run.config.seed}" for run in runs]
    runs = [
        replace(run, label=f"{name} ({run.label})" if names.count(name) > 1 else name)
        for run, name in zip(runs, names, strict=True)
    ]
    return sorted(runs, key=lambda run: run.is_control)


def method_of(run: Run, first: Run) -> str:
    """Whether the run has messages, and the settings of its method that differ from the first
    run's, or the sha256 of a custom function that has changed."""
    pairs = [(key, *map(attrgetter(key), (run.config, first.config))) for key in METHOD]
    own, other = (plain(each.config.game.options).get("search") for each in (run, first))
    pairs.append(("game.options.search", own, other))
    pairs.append(("policies", _own_settings(run.config), _own_settings(first.config)))
    settings = [
        f"{key}={value}"
        for name, own, other in pairs
        if own != other and not (name == "model.scratch" and None in (own, other))
        for key, _, value in changed(own, other, name)
    ]
    settings += [
        f"{what.split()[0]} of sha256 {digest[:8]}"
        for what, digest in run.own_code.items()
        if first.own_code.get(what, digest) != digest
    ]
    alike = run.is_control == first.is_control
    kind = "no messages" if run.is_control else "messages"
    return ", ".join(settings if settings and alike else [kind, *settings])


def _own_settings(config: Config) -> dict[str, Any]:
    """The settings of each of several policies, without its engine and its first weights."""
    found = {}
    for name, of in config.policies.items():
        model = {key: value for key, value in (of.model or {}).items() if key != "path"}
        found[name] = replace(of, model=model or None, warm_start=None, engine=None)
    return found


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each method."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    return methods


def changes(runs: Sequence[Run]) -> str:
    """What another method changes on the same held-out games, for each seed that the first run's
    method has too, and in the mean over the seeds."""
    first = {run.config.seed: run for run in runs if run.method == runs[0].method}
    lines = []
    found: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        other = first.get(run.config.seed)
        if other is None or run.method == other.method:
            continue
        if change := paired_change(*(each.after["sampled"] for each in (other, run))):
            before, after = map(_figures, (other, run))
            apart = {n: after[n] - before[n] for n in after if n in before}
            found.setdefault(run.method, []).append({"score": change[0], **apart})
            shown = [show_change(change), *(f"{n} {each:+.3f}" for n, each in apart.items())]
            lines.append(f"- {run.label}: {', '.join(shown)} next to {other.label}")
    for method, of_seeds in found.items():
        if (num := len(of_seeds)) > 1:
            means = ", ".join(f"{n} {each:+.3f}" for n, each in _means(of_seeds).items())
            lines.append(f"- {method}, mean of {num} seeds: {means}")
    return "\n".join(["On the same games, after self-play:", "", *lines]) if lines else ""


def _figures(run: Run) -> dict[str, float]:
    """The talk effect after self-play, messages, honesty where there are enough statements, and the
    game's own measures, those that the run has."""
    row = run.after["sampled"]
    counts = row.measures
    enough = counts.get("statements", 0.0) * len(row.scores) >= FEW_STATEMENTS
    known = [*(["messages"] if "messages" in counts else []), *(["honesty"] if enough else [])]
    own = measures_of([run], own=True).items()
    talk = {"talk effect": row.talk.effect[0]} if row.talk else {}
    shown = {name: counts[name] for name in known} | {h: counts[n] for n, h in own if n in counts}
    return talk | shown


def held_to(config: Config) -> dict[str, Any]:
    """The settings that decide which held-out games a run plays. Messages and search are always on,
    because controls may turn them off."""
    game = plain(config.game)
    game["options"] |= {name: True for name in ("messages", "search") if name in game["options"]}
    data = {"test": config.data.test, "validation": config.data.validation}
    return {"game": game, "data": data, "eval": {"final_games": config.eval.final_games}}


def results_table(runs: Sequence[Run]) -> str:
    """One row per run, sampled as in training unless a heading says greedy. Then the mean of each
    column over several runs of each method, and the worst score, agreement and talk effect.

    The rise is paired, game by game; its interval is left out after an aborted game.
    """
    measures = measures_of(runs)
    talk = any(run.after["sampled"].talk for run in runs)
    headings = (
        "run",
        "score before [95 %]",
        "score after [95 %]",
        "rise [95 %]",
        "greedy score",
        "greedy agreement",
        *(["talk effect [95 %]"] if talk else []),
        *measures.values(),
        "self-play",
    )
    lines = [row(headings), row(["---", *["--:"] * (len(headings) - 1)])]
    for run in runs:
        before, after = run.before["sampled"], run.after["sampled"]
        greedy, rise = _greedy([run]), paired_change(before, after)
        cells = [
            run.label,
            show_interval(before.interval),
            show_interval(after.interval),
            show_change(rise) if rise else f"{after.interval[0] - before.interval[0]:+.3f}",
            *(f"{each[0]:.3f}" if each else "-" for each in greedy),
            *([" → ".join(effect_cell(at.talk) for at in (before, after))] if talk else []),
            *_arrows(before.measures, after.measures, measures, len(after.scores)),
            clock(sum(step.get("step_s", 0.0) for step in run.steps)),
        ]
        lines.append(row(cells))
    methods = by_method(runs)
    for method, alike in methods.items():
        of_it = f" of {method}" if len(methods) > 1 else ""
        for name, of in (("mean", statistics.fmean), ("worst", min)) if len(alike) > 1 else ():
            stages = [[getattr(run, at)["sampled"] for run in alike] for at in ("before", "after")]
            befores, afters = ([each.interval[0] for each in rows] for rows in stages)
            rises = [after - before for before, after in zip(befores, afters, strict=True)]
            shown = [f"{of(values):.3f}" for values in (befores, afters)]
            shown += [f"{of(rises):+.3f}"]
            shown += [f"{of(each):.3f}" if each else "-" for each in _greedy(alike)]
            if talk:
                effects = [[e.talk.effect[0] for e in rows if e.talk] for rows in stages]
                shown += [" → ".join(f"{of(each):+.3f}" if each else "-" for each in effects)]
            means = [_means([each.measures for each in rows]) for rows in stages]
            num = sum(len(row.scores) for row in stages[1])
            shown += (
                _arrows(means[0], means[1], measures, num)
                if name == "mean"
                else [""] * len(measures)
            )
            lines.append(row([f"{name}{of_it}", *shown, ""]))
    return "\n".join(lines)


def _greedy(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """The greedy scores and agreement after self-play; none for old files in which a script named
    greedy replaces the policy."""
    rows = [run.after["greedy"] for run in runs if "greedy" in run.after]
    return [r.interval[0] for r in rows], [r.measures["agreement"] for r in rows]


def measures_of(runs: Sequence[Run], *, own: bool = False) -> dict[str, str]:
    """The headings of the measures that the runs have, or only of the game's `own`, by name."""
    left_out = {name for name, *_ in COLUMNS} if own else NOT_SHOWN
    columns = columns_of(run.after["sampled"].measures for run in runs)
    return {name: heading for name, heading, _ in columns if name not in left_out}


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure over the rows that have it; honesty's over all statements."""
    names = dict.fromkeys(name for row in rows for name in row)
    means = {name: statistics.fmean(row[name] for row in rows if name in row) for name in names}
    if num := sum(row.get("statements", 0.0) for row in rows if "honesty" in row):
        true = (row["honesty"] * row["statements"] for row in rows if "honesty" in row)
        means["honesty"] = sum(true) / num
    return means


def _arrows(
    before: dict[str, float], after: dict[str, float], names: Collection[str], num_games: int
) -> list[str]:
    """The cells of measures of `num_games` games before and after."""
    cells = (measure_cells(measures, names, num_games=num_games) for measures in (before, after))
    return [" → ".join(pair) for pair in zip(*cells, strict=True)]


def training_tables(runs: Sequence[Run]) -> list[str]:
    """A table of training games for each method with messages, named where there are several."""
    methods = by_method([run for run in runs if not run.is_control])
    tables = {method: training_table(alike) for method, alike in methods.items()}
    if len(tables) < 2:
        return [*tables.values()]
    return [f"Training games, {method}:\n\n{table}" for method, table in tables.items()]


def training_table(talking: Sequence[Run], *, parts: int = 8) -> str:
    """Training games by parts of the run: means over a part's steps and all runs."""
    last = max((step["step"] for run in talking for step in run.steps), default=0)
    able = (*CURVE_OF_TRAINING, *measures_of(talking, own=True))
    names = [name for name in able if any(name in s for r in talking for s in r.steps)]
    lines = [row(["steps", *names]), row(["---", *["--:"] * len(names)])]
    for part in range(min(parts, last)):
        first, end = (1 + last * bound // min(parts, last) for bound in (part, part + 1))
        steps = [s for run in talking for s in run.steps if first <= s["step"] < end]
        means = [[s[name] for s in steps if name in s] for name in names]
        shown = [f"{statistics.fmean(values):.4g}" if values else "-" for values in means]
        lines.append(row([f"{first}–{end - 1}", *shown]))
    return "\n".join(lines)


def commits(runs: Sequence[Run]) -> str:
    """A line that names the code that ran."""
    found = sorted({line for run in runs for line in run.code})
    return f"Code: {'; '.join(found) or 'commit unknown'}."


def baselines(runs: Sequence[Run]) -> str:
    """A note on how to read the table, and scripted players' scores on the same instances."""
    after = runs[0].after
    scripts = [name for name in after if name.startswith(SCRIPT)]
    shown = [f"{name} {show_interval(after[name].interval)}" for name in scripts]
    num_games = len(after["sampled"].scores)
    silent = silent_text(after, after["sampled"].talk)
    return (
        "Sampled as in training unless a heading says greedy. Messages, errors and so on: means "
        f"per game, before → after. Talk effect: {TALK_EFFECT}{silent and f'; {silent}'}. "
        f"Scripted players on the same {num_games:,} instances: {', '.join(shown)}."
    )


def curve_rows(run: Run) -> list[dict[str, Any]]:
    """The run's evaluations by step.

    Step 0 is the held-out evaluation before self-play, because a run plays its validation games
    only after its first steps.
    """
    sampled = run.before["sampled"]
    start = {f"eval_{name}": value for name, value in sampled.measures.items()}
    _, low, high = sampled.interval
    start |= {"eval_score_low": low, "eval_score_high": high}
    return [{"step": 0, **start}, *(step for step in run.steps if "eval_score" in step)]


def curves_svg(runs: Mapping[str, Sequence[Mapping[str, Any]]], *, y: str, title: str) -> str:
    """Metric `y` against `step`, one line per run, with the intervals of rows with `{y}_low` and
    `{y}_high`. Rows without a finite `y` are left out."""
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "selfplay", "text.parse_math": False}
    ):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=y.replace("_", " "))
        axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=COLOURS))
        axes.set_title(on_one_line(title), loc="left")
        axes.grid(axis="y", alpha=0.4)
        for name, rows in runs.items():
            shown = [row for row in rows if row.get(y) is not None and math.isfinite(row[y])]
            if shown:
                ends = ([row.get(f"{y}_{end}", row[y]) for row in shown] for end in ("low", "high"))
                values = [row[y] for row in shown]
                apart = [[abs(v - end) for v, end in zip(values, e, strict=True)] for e in ends]
                steps, label = [row["step"] for row in shown], on_one_line(name)
                axes.errorbar(steps, values, apart, label=label, elinewidth=1, marker="o", ms=3)
        figure.legend(loc="outside right upper")
        return svg_of(figure)


def write_curves(runs: Sequence[Run], folder: Path, *, name: str) -> list[str]:
    """Write one SVG per learning curve. Returns Markdown that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for metric, word, title in CURVES:
        rows = {run.label: curve_rows(run) for run in runs}
        if not any(metric in line for lines in rows.values() for line in lines):
            continue
        path = folder / f"{name}_{word}.svg"
        write_atomically(path, curves_svg(rows, y=metric, title=title))
        shown.append(f"![{title}]({path.as_posix()})")
    return shown


def games_to_read(run: Run, num: int) -> str:
    """The held-out games with the largest gains, before and after, among those kept in full."""
    before = {game["instance"]: game for game in run.before["sampled"].games}
    pairs = [
        (before[game["instance"]], game)
        for game in run.after["sampled"].games
        if game["instance"] in before
    ]
    pairs.sort(key=lambda pair: pair[0]["score_norm"] - pair[1]["score_norm"])
    sections = [
        f"Of the first {len(pairs)} held-out games ({run.label}), the {min(num, len(pairs))} that "
        "gained most."
    ]
    for first, last in pairs[:num]:
        sections += ["Before self-play:", fenced(game_text(first))]
        sections += ["After self-play:", fenced(game_text(last))]
    return "\n\n".join(sections)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a finished run's folder")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/figures"), help="folder for the figures"
    )
    parser.add_argument("--name", help="draw figures; the start of their file names")
    parser.add_argument("--games", type=int, default=1, help="games to print, before and after")
    args = parser.parse_args(words)
    try:
        runs = read_runs(args.runs)
        figures = write_curves(runs, args.out, name=args.name) if args.name else []
    except (SettingsError, ValueError, OSError) as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2
    parts = [results_table(runs), changes(runs), baselines(runs), commits(runs), *figures]
    parts += [*training_tables(runs), games_to_read(runs[0], args.games)]
    print("\n\n".join(filter(None, parts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
