"""Runs beside each other: a table with a column a run, and curves over the seeds of one
configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from selfplay.apps.report.charts import COLOURS, Line, Point, smoothed
from selfplay.apps.report.games import seats_of
from selfplay.apps.report.run_files import RunFiles
from selfplay.evaluation.tables import paired_change, show_change, show_interval

_OWN = ("out", "seed")  # settings in which the runs of one configuration differ


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one configuration, which differ in their seeds; `colour` is that of its lines."""

    runs: list[RunFiles]
    colour: str


def groups_of(runs: Sequence[RunFiles]) -> list[Group]:
    """The runs by configuration, in the order of their first runs."""
    found: dict[tuple[tuple[str, str], ...], list[RunFiles]] = {}
    for run in runs:
        own = tuple((key, value) for key, _, value in run.settings if key not in _OWN)
        # A run without readable settings is a configuration of its own.
        found.setdefault(own if run.config else (("", run.name),), []).append(run)
    return [Group(of, COLOURS[number % len(COLOURS)]) for number, of in enumerate(found.values())]


def group_lines(
    groups: Sequence[Group], points: Mapping[str, Sequence[Point]], *, smooth: bool = True
) -> Iterator[Line]:
    """A line for each group whose runs have any of these points, by the runs' names: of one run, or
    the mean of several at the steps that all have, with a band from the lowest to the highest run.
    It is named by the first of these runs, and their number. Evaluations are few, so they are not
    smoothed."""
    for group in groups:
        had = {run.name: own for run in group.runs if (own := points.get(run.name))}
        curves = [smoothed(own) if smooth else own for own in had.values()]
        if len(had) < 2:
            pairs = zip(had.items(), curves, strict=True)
            yield from (Line(name, line, group.colour, faint=own) for (name, own), line in pairs)
            continue
        each = [dict(curve) for curve in curves]
        shared = [step for step in each[0] if all(step in curve for curve in each)]
        values = {step: [curve[step] for curve in each] for step in shared}
        means = [(step, sum(of) / len(of)) for step, of in values.items()]
        yield Line(
            f"{next(iter(had))} ({len(had)} seeds)",
            means,
            group.colour,
            band=[(step, min(of), max(of)) for step, of in values.items()],
            tooltip=means,
        )


def runs_table(runs: Sequence[RunFiles]) -> list[tuple[str, list[str], bool]]:
    """(name, a cell for each run, whether the runs differ): results, then settings that differ from
    the defaults in any run. A page shows what differs."""
    given = [{key: value for key, _, value in run.settings} for run in runs]
    defaults = {key: default for run in runs for key, default, _ in run.settings}
    rows = {
        "state": [run.state for run in runs],
        "step": [f"{run.steps[-1]['step']:g}" if run.steps else "-" for run in runs],
    }
    for run_row in (dict(results(run)) for run in runs):
        for name in run_row:
            rows.setdefault(name, [])
    for name in [name for name, cells in rows.items() if not cells]:
        rows[name] = [dict(results(run)).get(name, "-") for run in runs]
    rows |= {key: [own.get(key, default) for own in given] for key, default in defaults.items()}
    return [(name, cells, len(set(cells)) > 1) for name, cells in rows.items() if name != "out"]


def results(run: RunFiles) -> Iterator[tuple[str, str]]:
    """The run's results by name, before and after self-play where there are both."""
    before, after = run.row("before", "sampled"), run.row("after", "sampled")
    if before:
        yield "score before", show_interval(before.interval)
    if after:
        yield "score after", show_interval(after.interval)
    if before and after and (change := paired_change(before, after)):
        yield "change", show_change(change)
    if after and after.talk:
        yield "talk effect after", show_change(after.talk.effect)
    if after and after.view:
        yield "view effect after", show_change(after.view.effect)
    rewards = [
        (f"reward/{number}", f"reward of {name}") for number, name in enumerate(seats_of(run))
    ]
    counts = (("messages", "messages a game"), ("errors", "invalid moves a game"))
    for name, heading in (*rewards, *counts):
        if after and name in after.measures:
            yield f"{heading} after", f"{after.measures[name]:.3f}"
    if run.unused:
        yield "groups without variance", run.unused
