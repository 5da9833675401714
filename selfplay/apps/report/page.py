"""Writes the page of one run or several: one HTML file that needs no network and runs only its own
script.

All texts of games are data in a JSON block that the page's script shows as text; everything else
goes through jinja2 with escaping on.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from selfplay.apps.report.charts import COLOURS, Chart, Level, Line, line_chart, smoothed
from selfplay.apps.report.compare import group_lines, groups_of, runs_table
from selfplay.apps.report.games import safe_json, seats_of, viewer_data
from selfplay.apps.report.run_files import LINKED, STAGES, RunFiles, RunRow, with_unique_names
from selfplay.atomic import write_atomically
from selfplay.evaluation.tables import (
    TALK_EFFECT,
    VIEW_EFFECT,
    columns_of,
    effect_cell,
    measure_cells,
    paired_change,
    score_meaning,
    show_change,
    show_interval,
    silent_text,
    talk_text,
)
from selfplay.metrics.records import OBSERVED

_HERE = Path(__file__).parent
# The curves of one run: title, the metrics with their names, and a note.
_CURVES = (
    ("Talk", (("messages", "messages per game"), ("statements", "values stated per game")), ""),
    (
        "Agreement and honesty",
        (
            ("agreement", "agreement"),
            ("score_if_agreed", "score if agreed"),
            ("optimal", "optimal"),
            ("honesty", "honesty"),
        ),
        "agreement, optimal: fractions of games; honesty: fraction of true stated values",
    ),
    (
        "View effect",
        (
            ("eval_view_effect", "view effect"),
            ("eval_view_effect_low", "low end"),
            ("eval_view_effect_high", "high end"),
        ),
        "score lost with another private view, validation games",
    ),
    ("Judge", (("mark", "mark"),), "mean over games, 0 to 1"),
    ("Aborted games", (("num_void", "aborted games"),), "per step, without a result"),
    ("Entropy", (("entropy", "entropy"),), "nats per token"),
    ("KL to the reference", (("kl_reference", "KL to the reference"),), "nats per token"),
    ("Groups without signal", (("zero_variance_groups", "zero-variance groups"),), "fraction"),
    ("Speed", (("tokens_per_s", "tokens per second"),), "of the engine"),
)
# The row of the training's health: title, the metrics with their names, and a unit.
_HEALTH = (
    ("Gradient norm", (("grad_norm", "before clipping"),), ""),
    ("Learning rate", (("lr", "learning rate"),), ""),
    ("Clip share", (("clip_share", "clip share"),), "of tokens"),
    ("Ratio", (("ratio_mean", "mean ratio"), ("mismatch_ess", "effective sample size")), ""),
    ("Mismatch", (("mismatch_mean", "mean"), ("mismatch_max", "largest")), "nats"),
    ("Tokens", (("tokens_turn", "a turn"), ("tokens_game", "a game")), "sampled"),
    ("Memory", (("memory_gib", "trainer"), ("device_gib", "device")), "GiB"),
)
# The loop's own: a metric of a game or an observer may end in _s, too.
_STAGES = ("credit", "eval", "play", "push", "save", "sleep", "sync_check", "update")
_NUM_STAGES = 3  # stages of a step with a line of their own
_WITH_PARTNER = "eval_score/"  # starts the metric of each of `eval.partners`
_IMITATION = "Warm-start loss"  # by optimizer step, which has no games
# The curves of several runs, one line per run.
_COMPARED = (
    ("reward", "Reward"),
    ("messages", "Messages per game"),
    ("honesty", "Honesty"),
    ("errors", "Invalid moves per game"),
    ("entropy", "Entropy, nats per token"),
    ("kl_reference", "KL to the reference, nats per token"),
    ("step_s", "Seconds per step"),
)


def write_report(runs: Sequence[RunFiles], out: Path) -> None:
    """Write the page of these runs to `out`, atomically."""
    write_atomically(out, page_html(runs, out.parent))


def is_page(path: Path) -> bool:
    """Whether a file is a page of `write_report`, judged by its title, or is empty."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    return not start or re.search(rb"<title>.* selfplay</title>", start, re.DOTALL) is not None


def page_html(runs: Sequence[RunFiles], home: Path | None = None) -> str:
    """The page of at least one run as HTML. `home` is the folder that it will be in, from which it
    links to the runs' files; None leaves these links out."""
    runs = with_unique_names(runs)
    health = health_charts(runs[0]) if len(runs) == 1 else []
    charts = [*health, *(run_charts(runs[0]) if len(runs) == 1 else compared_charts(runs))]
    games = viewer_data(runs)
    drawn = time.time()
    running = [run.redrawn_s for run in runs if run.state == "running"]
    live = {"drawn": drawn, "running": bool(running), "due_s": max(running, default=0)}
    hover = [
        {name: getattr(chart, name) for name in ("box", "x", "y", "lines")}
        | {"games": chart.title != _IMITATION}
        for chart in charts
    ]
    shown = {**games, **live, "charts": hover}
    return fill(
        _HERE / "page.html.j2",
        scripts=[_HERE / "game.js", _HERE / "page.js"],
        styles=[_HERE / "page.css"],
        title=" · ".join(run.name for run in runs),
        runs=runs,
        tiles=[(run, list(tiles(run)), list(links(run, home))) for run in runs],
        health=health,
        charts=charts,
        svg=Markup,
        table=scores_table(runs),
        league=_league(runs[0]) if len(runs) == 1 else "",
        times=times_of(runs),
        compared=runs_table(runs) if len(runs) > 1 else [],
        settings=runs[0].settings,
        num_games=len(games["games"]),
        num_left_out=games["num_left_out"],
        drawn=time.strftime("%Y-%m-%d %H:%M", time.localtime(drawn)),
        data=Markup(safe_json(shown)),
    )


def _league(run: RunFiles) -> str:
    """The league's section, imported only for a run that has one: its ratings need torch."""
    if not (run.folder / "league.jsonl").exists():
        return ""
    from selfplay.league.page import league_section

    return league_section(run.folder, run.config)


def fill(template: Path, *, scripts: Sequence[Path], styles: Sequence[Path], **values: Any) -> str:
    """A template filled with its scripts and styles, and with `script_hash` for the content policy,
    with which a browser runs no other script."""
    script, style = (
        "\n".join(path.read_text("utf-8") for path in paths) for paths in (scripts, styles)
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(template.read_text("utf-8")).render(
        script=Markup(script),
        style=Markup(style),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def links(run: RunFiles, home: Path | None) -> Iterator[tuple[str, str]]:
    """(name, address) of the run's page at its tracker, if it has one, and of the files that a
    reader asks for."""
    if run.tracker:
        yield "tracker", run.tracker
    for name in LINKED:
        if home is not None and (run.folder / name).is_file():
            path = os.path.relpath((run.folder / name).resolve(), home.resolve())
            yield name, quote(Path(path).as_posix())


def tiles(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """The numbers at the top of the page: (name, value, explanation)."""
    before, after = run.row("before", "sampled"), run.row("after", "sampled")
    if before and after and run.steps:
        change = paired_change(before, after)
        yield (
            "score on held-out games",
            f"{before.interval[0]:.3f} → {after.interval[0]:.3f}",
            f"change {show_change(change)}" if change else show_interval(after.interval),
        )
        if before.talk and after.talk:
            was, now = before.talk.effect, after.talk.effect
            meaning = f"after {show_change(now)}: score lost with messages of other games"
            silent = silent_text(_same_games(run, after), after.talk)
            meaning = "; ".join(filter(None, (meaning, silent)))
            yield "talk effect", f"{was[0]:+.2f} → {now[0]:+.2f}", meaning
        if before.view and after.view:
            was, now = before.view.effect, after.view.effect
            meaning = f"after {show_change(now)}: score lost with another private view"
            yield "view effect", f"{was[0]:+.2f} → {now[0]:+.2f}", meaning
        called = seats_of(run)
        rewards = [(f"reward/{i}", f"reward of {name}") for i, name in enumerate(called)]
        meaning = "before → after"
        for measure, name in (
            *rewards,
            ("messages", "messages per game"),
            ("errors", "invalid moves per game"),
        ):
            if measure in before.measures and measure in after.measures:
                old, new = before.measures[measure], after.measures[measure]
                digits = 3 if 0 < max(abs(old), abs(new)) < 0.1 else 2
                yield name, f"{old:.{digits}f} → {new:.{digits}f}", meaning
    elif before:
        name = "score" if run.config and not run.config.steps else "score before self-play"
        mean, _, interval = show_interval(before.interval).partition(" ")
        yield name, mean, f"{interval}, 95 %"
    evaluated = [step for step in run.steps if step.get("eval_score") is not None]
    if evaluated and not after:
        last = evaluated[-1]
        yield "score on validation games", f"{last['eval_score']:.3f}", f"at step {last['step']}"
    if run.imitation:
        first, last = run.imitation[0], run.imitation[-1]
        counts = ("transcripts of games", "num_transcripts"), ("chats", "num_chats")
        what = [f"{last[key]:,} {name}" for name, key in counts if last.get(key)]
        losses = " → ".join(f"{line['imitation_loss']:.3f}" for line in (first, last))
        meaning = ", ".join([f"{last['step']:,} optimizer steps", *what])
        yield "warm-start loss", losses, meaning
    if run.steps:
        seconds = sum(step.get("step_s") or 0.0 for step in run.steps)
        spent = f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
        yield "steps", str(run.steps[-1]["step"]), f"{spent} of self-play"


# --- curves -------------------------------------------------------------------------------------


def points_of(run: RunFiles, metric: str) -> list[tuple[float, float]]:
    """(step, value) of each step that has the metric."""
    return [(step["step"], step[metric]) for step in run.steps if step.get(metric) is not None]


def evaluated_points(run: RunFiles) -> list[tuple[float, float]]:
    """The score on validation games, from step 0 on if there are held-out games before it; none
    without validation games."""
    points, before = points_of(run, "eval_score"), run.row("before", "sampled")
    return [(0, before.interval[0]), *points] if points and before else points


def score_lines(run: RunFiles, colour: str, *, name: str = "") -> Iterator[Line]:
    """The score on validation games with its interval, and the training score. Step 0 is the score
    of the held-out games before self-play."""
    band = [
        (s["step"], s["eval_score_low"], s["eval_score_high"])
        for s in run.steps
        if s.get("eval_score_low") is not None and s.get("eval_score_high") is not None
    ]
    training, evaluated = points_of(run, "score"), evaluated_points(run)
    if evaluated and (before := run.row("before", "sampled")):
        band.insert(0, (0, *before.interval[1:]))
    if evaluated:
        yield Line(name or "validation games", evaluated, colour, band)
    if not name or not evaluated:
        shown = COLOURS[1] if evaluated and not name else colour
        yield Line(name or "training games", smoothed(training), shown, faint=training)


def reference_levels(run: RunFiles) -> list[Level]:
    """People and scripted players on the same kind of instances."""
    levels: dict[str, Level] = {}
    for row in run.rows:
        if row.kind == "reference" and row.name not in levels:
            colour = COLOURS[(2 + len(levels)) % len(COLOURS)]
            levels[row.name] = Level(row.name, row.interval, colour)
    return list(levels.values())


def metric_lines(run: RunFiles, metrics: Iterable[tuple[str, str]]) -> list[Line]:
    """A line for each of these (metric, name) that the run has, in a run of several policies one
    for each of them, with gaps where it does not train; aborted games only if there are any.
    Evaluations are few and have many games each, so they are not smoothed."""
    metrics, policies = list(metrics), policies_of(run)
    metrics = [
        each
        for metric, name in metrics
        for each in (
            (metric, name),
            *((f"{metric}/{p}", p if len(metrics) == 1 else f"{name}, {p}") for p in policies),
        )
    ]
    idle = {
        policy: [step for step, num in points_of(run, f"num_trained_tokens/{policy}") if not num]
        for policy in policies
    }
    had = [
        (
            name,
            points,
            points if metric.startswith("eval_") else smoothed(points),
            idle.get(metric.partition("/")[2], ()),
        )
        for metric, name in metrics
        if (points := points_of(run, metric))
        and (metric != "num_void" or any(value for _, value in points))
    ]
    return [
        Line(name, line, COLOURS[i % len(COLOURS)], faint=points, gaps=gaps)
        for i, (name, points, line, gaps) in enumerate(had)
    ]


def partner_lines(run: RunFiles) -> list[Line]:
    """The score on validation games with each of `eval.partners`, starting with the held-out games
    before self-play; none without partners."""
    partners = _metrics_with(run, _WITH_PARTNER)
    with_each = [(name, f"with {name.removeprefix(_WITH_PARTNER)}") for name in partners]
    lines = []
    for line in metric_lines(run, [*with_each, ("eval_score", "by itself")] if partners else []):
        own = "" if line.name == "by itself" else f" {line.name}"
        before = run.row("before", f"sampled{own}")
        points = [*([(0, before.interval[0])] if before else []), *line.points]
        lines.append(replace(line, points=points, faint=points))
    return lines


def reward_lines(run: RunFiles) -> list[Line]:
    """The reward of each seat, or of all if there are none by seat; its spread dashed."""
    numbers = _metrics_with(run, "reward/")
    called = dict(enumerate(seats_of(run)))
    seats = [(name, int(name.removeprefix("reward/"))) for name in numbers]
    lines = metric_lines(run, [(name, called.get(n, f"seat {n}")) for name, n in seats])
    lines = lines or metric_lines(run, [("reward", "reward")])
    spread = metric_lines(run, [("reward_std", "standard deviation of all")])
    return lines + [
        replace(line, colour=COLOURS[-1], faint=(), tooltip=line.faint, dashed=True)
        for line in spread
    ]


def policies_of(run: RunFiles) -> list[str]:
    """The names of the run's policies, sorted; none of a single one.

    They come from the metrics, so that a run whose settings cannot be read has them too.
    """
    return [name.removeprefix("entropy/") for name in _metrics_with(run, "entropy/")]


def health_charts(run: RunFiles) -> list[Chart]:
    """Small charts of the training's health and of the longest stages of a step."""
    charts = [
        line_chart(title, metric_lines(run, metrics), note=unit, small=True, log=unit == "nats")
        for title, metrics, unit in _HEALTH
    ]
    stages = [(f"{name.replace(' ', '_')}_s", name) for name, *_ in times_table(run)]
    lines = metric_lines(run, [("step_s", "step"), *stages[:_NUM_STAGES]])
    charts.append(line_chart("Seconds", lines, note="a step", small=True))
    return [chart for chart in charts if chart]


def run_charts(run: RunFiles) -> list[Chart]:
    """The charts of one run that have data. If seats have different rewards, scores with fixed
    partners and the seats' rewards come first."""
    what = "scores of the policy's seats" if run.unequal else "fraction of the best value"
    note = f"{what}, 95 % intervals; dashed: other players"
    lines = list(score_lines(run, COLOURS[0]))
    score = line_chart("Score", lines, reference_levels(run), note=note)
    partners = line_chart("Score with fixed partners", partner_lines(run), note="validation games")
    reward = line_chart("Reward", reward_lines(run), note="of the policy's seats, in training")
    first = [partners, reward, score] if run.unequal else [score, partners, reward]
    curves = [
        line_chart(title, metric_lines(run, metrics), note=note) for title, metrics, note in _CURVES
    ]
    own = [
        line_chart(heading.capitalize(), metric_lines(run, [(name, heading)]), note=meaning)
        for name, heading, meaning in own_measures(run)
    ]
    by_kind = [
        Line(
            kind.removeprefix("errors_").replace("_", " "),
            smoothed(points := [(step["step"], step.get(kind) or 0.0) for step in run.steps]),
            COLOURS[i % len(COLOURS)],
            tooltip=points,
            dashed=i >= len(COLOURS),
        )
        for i, kind in enumerate(_metrics_with(run, "errors_"))
    ]
    errors = line_chart("Errors by kind", by_kind, note="invalid moves per game")
    imitated = (("imitation_loss", "all"), ("imitation_loss_chats", "only chats"))
    losses = metric_lines(replace(run, steps=run.imitation), imitated)
    imitation = line_chart(_IMITATION, losses, note="nats per token, by optimizer step")
    charts = [*first, *curves[:2], errors, *own, *curves[2:], imitation]
    return [chart for chart in charts if chart]


def own_measures(run: RunFiles) -> list[tuple[str, str, str]]:
    """The game's measures without another curve, then the observers' metrics: name, heading,
    meaning."""
    shown = {"statements", "true_statements", "judged"}
    shown |= {name for _, metrics, _ in _CURVES for name, _ in metrics}
    counted = [one for game in run.games if isinstance(one := game.get("measures"), dict)]
    own = columns_of([str(name) for name in one if name not in shown] for one in counted)
    observed = _metrics_with(run, OBSERVED)
    headings = [name.removeprefix(OBSERVED).replace("_", " ") for name in observed]
    return own + [(n, h, "by an observer") for n, h in zip(observed, headings, strict=True)]


def _metrics_with(run: RunFiles, prefix: str) -> list[str]:
    """The names of the run's metrics with this prefix, sorted."""
    return sorted({name for step in run.steps for name in step if name.startswith(prefix)})


def compared_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """The charts of several runs, one line per configuration, a mean with a band if it has several
    seeds; the score's also has the players that all were compared with on the same games."""
    levels = [reference_levels(run) for run in runs]
    shared = [one for one in levels[0] if all(one in other for other in levels)]
    groups = groups_of(runs)
    over = "; band: lowest to highest seed" if len(groups) < len(runs) else ""
    scores = [
        line
        for group in groups
        if len(group.runs) == 1
        for line in score_lines(group.runs[0], group.colour, name=group.runs[0].name)
    ]
    evaluated = {run.name: evaluated_points(run) for run in runs}
    for group in (group for group in groups if len(group.runs) > 1):
        begun = [run.name for run in group.runs if run.steps]
        on_training = not all(evaluated[name] for name in begun)
        points = {run.name: points_of(run, "score") for run in group.runs}
        points = points if on_training else evaluated
        scores += group_lines([group], points, smooth=on_training)
    note = f"validation games if there are any; dashed: other players{over}"
    charts = [line_chart("Score", scores, shared, note=note)]
    own = {name: heading for run in runs for name, heading, _ in own_measures(run)}
    for metric, title in (*_compared(runs), *((name, own[name].capitalize()) for name in own)):
        points = {run.name: points_of(run, metric) for run in runs}
        lines = group_lines(groups, points, smooth=not metric.startswith("eval_"))
        charts.append(line_chart(title, list(lines), note=over[2:]))
    return [chart for chart in charts if chart]


def _shared_seats(runs: Sequence[RunFiles]) -> list[str]:
    """What the runs call each seat, by its number if they differ in that.

    So runs of one game have its roles, while a page with two games says "seat 0" for both first
    seats, as many as the larger game has.
    """
    first, *others = map(seats_of, runs)
    if all(other == first for other in others):
        return first
    return [f"seat {number}" for number in range(max(map(len, (first, *others))))]


def _compared(runs: Sequence[RunFiles]) -> Iterator[tuple[str, str]]:
    """(metric, title) of each chart of several runs: scores with fixed partners, rewards of seats
    that are paid apart in any run, and what each of several policies has.

    A run without a metric has no line in its chart, and a chart without lines is left out: a run of
    one policy has "Entropy", one of several "Entropy of NAME".
    """
    partners = dict.fromkeys(name for run in runs for name in _metrics_with(run, _WITH_PARTNER))
    for name in partners:
        yield name, f"Score with {name.removeprefix(_WITH_PARTNER)}, validation games"
    seats = _shared_seats(runs) if any(run.unequal for run in runs) else ()
    yield from ((f"reward/{number}", f"Reward of {name}") for number, name in enumerate(seats))
    policies = dict.fromkeys(name for run in runs for name in policies_of(run))
    for metric, title in _COMPARED:
        yield metric, title
        what, comma, unit = title.partition(",")
        yield from ((f"{metric}/{name}", f"{what} of {name}{comma}{unit}") for name in policies)


# --- tables -------------------------------------------------------------------------------------


def scores_table(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """All evaluations: intervals, and means per game. `low` and `high` are the ends of the scale
    that the bars of the intervals share. A script that has the same numbers in several runs, as it
    played the same games, has one row of all of them."""
    found: dict[tuple[Any, ...], tuple[list[RunFiles], RunRow]] = {}
    for number, run in enumerate(runs):
        for row in run.rows:
            own = -1 if row.kind == "reference" else number
            key = own, row.source, row.name, *row.interval, *row.measures.items()
            if not _repeated(run, row):
                found.setdefault(key, ([], row))[0].append(run)
    rows = list(found.values())
    if len(runs) > 1:  # the same players of all runs are neighbours
        order = list(dict.fromkeys((row.source, row.name) for _, row in rows))
        rows.sort(key=lambda one: order.index((one[1].source, one[1].name)))
    called = _shared_seats(runs)

    def by_role(words: str) -> str:
        """A heading with the seats' roles for their numbers."""
        return re.sub(
            r"\bseat (\d+)",
            lambda found: called[n] if (n := int(found[1])) < len(called) else found[0],
            words,
        )

    columns = [
        (name, by_role(heading), meaning)
        for name, heading, meaning in columns_of(row.measures for _, row in rows)
    ]
    low = min((row.interval[1] for _, row in rows), default=0.0)
    high = max((row.interval[2] for _, row in rows), default=1.0)
    width = max(high - low, 1e-9)

    def line(of: Sequence[RunFiles], row: RunRow) -> dict[str, Any]:
        """A row's cells as text, and the places of its bar and its dot in percent of the scale."""
        mean, start, end = ((value - low) / width * 100 for value in row.interval)
        is_reference = row.kind == "reference"
        return {
            "run": "all" if len(of) == len(runs) else ", ".join(run.name for run in of),
            "source": "held-out" if is_reference and row.source in STAGES else row.source,
            "name": row.name,
            "policy": row.kind == "policy",
            "score": show_interval(row.interval),
            "talk": effect_cell(row.talk),
            "talk_text": talk_text(row.talk, _same_games(of[0], row)) if row.talk else "",
            "view": effect_cell(row.view),
            "bar": f"left:{start:.1f}%;width:{max(end - start, 0.8):.1f}%",
            "dot": f"left:{mean:.1f}%",
            "cells": measure_cells(
                row.measures, (measure for measure, _, _ in columns), num_games=len(row.scores)
            ),
            "num": len(row.scores),
        }

    talk = any(row.talk for _, row in rows)
    return {
        "score": score_meaning(columns),
        "columns": columns,
        "talk": TALK_EFFECT if talk else "",
        "view": VIEW_EFFECT if any(row.view for _, row in rows) else "",
        "rows": [line(of, row) for of, row in rows],
    }


def _same_games(run: RunFiles, row: RunRow) -> dict[str, RunRow]:
    """All rows of a row's file, by name."""
    return {each.name: each for each in run.rows if each.source == row.source}


def _repeated(run: RunFiles, row: RunRow) -> bool:
    """Whether a scripted row before self-play also exists after it, with the same games."""
    after = run.row("after", row.name)
    return row.source == "before" and row.kind == "reference" and after is not None


def times_table(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """(stage, mean seconds, share of the step, width of its bar), the longest stage first."""
    seconds = {
        name: sum(step.get(f"{name}_s") or 0.0 for step in run.steps) / len(run.steps)
        for name in (*_STAGES, "step")
        if any(f"{name}_s" in step for step in run.steps)
    }
    step = seconds.pop("step", 0.0)
    if not step:
        return []
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return [
        (name.replace("_", " "), f"{s:.3f}", f"{s / step:.1%}", f"width:{100 * s / step:.1f}%")
        for name, s in [*ranked, ("other", max(0.0, step - sum(seconds.values())))]
    ]


def times_of(runs: Sequence[RunFiles]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """A row for each stage, the longest of the first run first: its name and, for each run, mean
    seconds, share of the step and width of its bar."""
    tables = [{name: (s, part, bar) for name, s, part, bar in times_table(run)} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    none = ("-", "-", "width:0%")
    return [(name, [table.get(name, none) for table in tables]) for name in names]
