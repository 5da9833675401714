"""The report of an evaluation: tables for the terminal, a Markdown page, a JSON file.

Means are per game; `score_meaning` defines the score.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np

from dialop.shown import escaped, fenced, on_one_line
from selfplay.atomic import write_atomically
from selfplay.errors import SettingsError
from selfplay.evaluation.plan import pair_name
from selfplay.evaluation.rows import Row, paired, with_partners
from selfplay.evaluation.tables import (
    VIEW_EFFECT,
    columns_of,
    paired_interval,
    score_meaning,
    score_table,
    show_change,
    show_interval,
    table,
    talk_text,
)
from selfplay.metrics.records import game_text
from selfplay.metrics.step_log import plain_json

_ERRORS = "errors_"
MAX_NAME = 30  # columns of a player's name in a terminal
_HOW_TO_READ = (
    "Score of the row's player with the column's, with a 95 % interval over games. The row's "
    "player has seat 0 in the upper line, seat 1 in the lower one, and both seats with itself."
)
_HOW_TO_READ_ROLES = (
    "Score of all seats, with a 95 % interval over games: the {} of the row's run with the {} of "
    "the column's."
)
_STRANGERS = (
    "Lost with strangers: the mean of the diagonal minus the mean of the other cells between its "
    "runs, paired by instance."
)
_LOST = (
    "Lost to each other: the mean of the two self-play scores minus the mean of the two cross-play "
    "scores, paired by instance; a game's score is the mean over its players. Above 0 the two "
    "score higher in self-play than with each other, on average."
)


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated:
    """A finished evaluation: its facts, and a row per pair of players on the same instances. It
    prints as its tables, in a notebook too.

    `matrix` holds the row and column labels of a cross-play matrix, whose cells are the rows named
    by `pair_name`; None for a single policy. In a matrix of roles, `roles` are the rows' roles and
    the columns', and the cell of (a, b) is played by the first of a and the second of b. `paths`
    are its evaluation.json and evaluation.md. Under torchrun only the first process has the paths
    and all rows.
    """

    title: str
    facts: dict[str, Any]
    results: dict[str, Row]
    matrix: tuple[Sequence[str], Sequence[str]] | None = None
    paths: tuple[Path, ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, Any]:
        """The content of evaluation.json: facts, `rows`, and the `matrix` of a cross-play."""
        record: dict[str, Any] = json.loads(json.dumps(as_json(self)))
        return record

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """By the players' names: `scores` (one per game, from 0 to 1), `interval` (mean, low,
        high), `measures` (means per game), `talk`, and the first `games`."""
        rows: dict[str, dict[str, Any]] = self.record["rows"]
        return rows

    def __str__(self) -> str:
        return markdown(self, games=False, style="plain")

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return markdown(self, games=False)

    def cells(self) -> dict[tuple[str, str], Row]:
        """The matrix: the row of each (player in seat 0, player in seat 1)."""
        rows, columns = self.matrix or ((), ())
        pairs = [pair for r in rows for c in columns for pair in ((r, c), (c, r))]
        return {pair: self.results[pair_name(*pair)] for pair in pairs}


def table_text(rows: Mapping[str, Row]) -> str:
    """One line per pair for a terminal: score with its 95 % interval, then means per game."""
    return _table(with_partners(rows), on_one_line, style="plain")


def _table(rows: Mapping[str, Row], shown: Callable[[str], str], *, style: str) -> str:
    headings = {
        measure: heading
        for measure, heading, _ in columns_of(row.measures for row in rows.values())
    }
    labels = {name: shown(name) for name in rows}
    if style == "plain":
        labels = short_names([*labels.values()])
        named = {labels[shown(name)]: row for name, row in rows.items()}
    else:
        named = {labels[name]: row for name, row in rows.items()}
    return table(*score_table(named, headings), style=style)


def lost_together(report: Evaluated) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Self-play score minus cross-play score of each pair of players, as (mean, low, high) over
    instances.

    An instance gives (s_aa + s_bb) / 2 - (s_ab + s_ba) / 2 (Hu et al. 2020, "Other-Play"), where
    s_ab is the mean score of both players with a in seat 0. A pair is left out if a self-play cell
    is missing or an aborted game removed an instance from one of its four cells.
    """
    intervals, cells = {}, report.cells()
    with_self_play = [one for one, other in cells if one == other]
    for one, other in combinations(with_self_play, 2):
        pairs = [(one, one), (other, other), (one, other), (other, one)]
        if not all(pair in cells for pair in pairs):
            continue
        if paired([cells[pair] for pair in pairs]):
            scores = zip(*(_of_both(cells[pair]) for pair in pairs), strict=True)
            losses = [(aa + bb - ab - ba) / 2 for aa, bb, ab, ba in scores]
            intervals[one, other] = paired_interval(losses)
    return intervals


def lost_with_strangers(report: Evaluated) -> tuple[float, float, float] | None:
    """The mean score of the runs of a matrix with themselves minus their mean score with each
    other, (mean, low, high) over instances.

    An instance gives the mean of its scores in the n cells of the diagonal minus the mean of those
    in the n (n - 1) other cells between the same runs. None if n < 2, or if an aborted game removed
    an instance from one of the cells.
    """
    cells = report.cells()
    own = [one for one, other in cells if one == other]
    pairs = {pair: row for pair, row in cells.items() if {*pair} <= {*own}}
    if len(own) < 2 or not paired(pairs.values()):
        return None
    at_home, away = (
        np.mean([_of_both(row) for (a, b), row in pairs.items() if (a == b) == same], axis=0)
        for same in (True, False)
    )
    return paired_interval(at_home - away)


def _of_both(row: Row) -> list[float]:
    """Each game's mean score over its players."""
    return [(a + b) / 2 for a, b in zip(row.scores, (row.partner or row).scores, strict=True)]


def matrix_text(report: Evaluated, *, style: str = "pipe") -> str:
    """The matrix, then what strangers lose; "" for a single policy."""
    shown, filled = _shows(style)
    if report.matrix is None:
        return ""
    sections = [(_roles_table if report.roles else _seats_table)(report, style=style)]
    how = _HOW_TO_READ_ROLES.format(*report.roles) if report.roles else _HOW_TO_READ
    sections.append(filled(how))
    if report.roles and (strangers := lost_with_strangers(report)):
        sections.append(filled(f"{_STRANGERS} {show_interval(strangers)}"))
    if lost := lost_together(report):
        pairs = [
            [shown(f"{one} and {other}"), show_interval(loss)]
            for (one, other), loss in lost.items()
        ]
        sections += [filled(_LOST), table(["pair", "lost [95 %]"], pairs, style=style)]
    return "\n\n".join(sections)


def _seats_table(report: Evaluated, *, style: str) -> str:
    """Two lines per row: the player in seat 0, and in seat 1."""
    shown, cells = _shows(style)[0], report.cells()
    rows, columns = report.matrix or ((), ())

    def cell(row: str, column: str, seat: int) -> str:
        if seat == 1 and row == column:  # self-play is shown in the line of seat 0 only
            return ""
        if seat == 0:
            return show_interval(cells[row, column].interval)
        played = cells[column, row]
        return show_interval((played.partner or played).interval)

    lines = [
        [shown(row) if seat == 0 else "", str(seat), *(cell(row, c, seat) for c in columns)]
        for row in rows
        for seat in (0, 1)
    ]
    head = ["", "seat", *map(shown, columns)]
    return table(head, lines, style=style, num_names=2)


def _roles_table(report: Evaluated, *, style: str) -> str:
    """A line for each run in the first role, a column for each in the others; a dash for a cell
    that was not played."""
    shown, cells = _shows(style)[0], report.cells()
    _, runs = report.matrix or ((), ())
    means = {pair: show_interval(row.interval) for pair, row in cells.items()}
    lines = [[shown(one), *(means.get((one, other), "-") for other in runs)] for one in runs]
    head = [f"{report.roles[0]}, below; {report.roles[1]}, right", *map(shown, runs)]
    return table(head, lines, style=style)


def _shows(style: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """For this style of `table`: functions that show foreign text on one line, and a paragraph."""
    if style == "pipe":
        return escaped, str
    return on_one_line, partial(textwrap.fill, width=shutil.get_terminal_size().columns)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name in at most MAX_NAME columns, so that a table in a terminal has room for numbers: a
    long one keeps its start and its end, with a number if others would look the same."""
    short: dict[str, str] = {}
    for name in names:
        cut = name if len(name) <= MAX_NAME else f"{name[:9]}…{name[10 - MAX_NAME :]}"
        label, number = cut, 1
        while label in short.values():
            number += 1
            label = f"{cut[: MAX_NAME - 3]} {number}"
        short[name] = label
    return short


def _fact(value: Any) -> str:
    """A fact as text: the items of a list, or the names of a mapping with their values."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def markdown(report: Evaluated, *, games: bool = True, style: str = "pipe") -> str:
    """The page: facts, the matrix, the table with its legend, errors by kind and, with `games`, the
    best, the typical and the worst game of a single policy's rows. The style "plain" is for a
    terminal."""
    shown, filled = _shows(style)
    words, files = report.facts.get("overrides", ()), report.facts.get("code", ())
    facts = report.facts | {"overrides": " ".join(words), "code": ", ".join(files), "asked": ""}
    rows = with_partners(report.results)
    columns = columns_of(row.measures for row in rows.values())
    star, hashes = ("*", "## ") if style == "pipe" else ("", "")
    legend = "; ".join(f"{star}{heading}{star} {meaning}" for _, heading, meaning in columns)
    sections = [
        f"{hashes[1:]}{shown(report.title)}",
        "\n".join(filled(f"- {n}: {shown(_fact(v))}") for n, v in facts.items() if v != ""),
        matrix_text(report, style=style),
        _table(rows, shown, style=style),
        filled(
            f"Score: {score_meaning(columns)}, with a 95 % interval over games. Means per game: "
            f"{legend}."
        ),
    ]
    on_same = {shown(name): row for name, row in report.results.items()}
    sections += [
        filled(f"{shown(name)}: {talk_text(row.talk, on_same)}")
        for name, row in report.results.items()
        if row.talk
    ]
    sections += [
        filled(
            f"{shown(name)}: view effect {show_change(row.view.effect)} in {row.view.num_games} "
            f"games: {VIEW_EFFECT}"
        )
        for name, row in report.results.items()
        if row.view
    ]
    errors = [
        filled(f"- {shown(f'{name}: {k}')}") for name, row in rows.items() if (k := _kinds(row))
    ]
    if errors:
        sections += [f"{hashes}Errors per game by kind", "\n".join(errors)]
    for name, row in report.results.items():
        if games and report.matrix is None and name.startswith("policy"):
            for label, record in row.examples.items():
                sections += [f"## {label.capitalize()} game of {shown(name)}"]
                sections += [fenced(game_text(record))]
    return "\n\n".join(filter(None, sections)) + "\n"


def as_json(report: Evaluated) -> dict[str, Any]:
    """The report as plain values; a row's scores are in the order of the instances. Each row holds
    its three example games; a single policy's row also holds its first games."""
    rows = rows_json(report.results)
    if report.matrix is None:
        return {**report.facts, "rows": rows}
    sides = report.roles or ("seat_0", "seat_1")
    matrix = {
        "rows": list(report.matrix[0]),
        "columns": list(report.matrix[1]),
        "cells": [
            {**dict(zip(sides, pair, strict=True)), "row": pair_name(*pair)}
            for pair in report.cells()
        ],
        "lost_together": [
            {"players": list(pair), "interval": list(interval)}
            for pair, interval in lost_together(report).items()
        ],
    }
    if report.roles:
        matrix |= {"roles": [*report.roles], "lost_with_strangers": lost_with_strangers(report)}
    rows = {name: {**row, "games": []} for name, row in rows.items()}
    return {**report.facts, "rows": rows, "matrix": matrix}


def rows_json(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The rows as plain values for a result file (`read_rows` reads them back)."""
    return {name: asdict(row) for name, row in rows.items()}


def check_report_place(folder: Path) -> None:
    """Raise SettingsError if the folder has a file with the name of a report's but of other origin,
    such as the config.yaml of a run."""
    names = ("evaluation.json", "evaluation.md", "config.yaml")
    there = [name for name in names if os.path.lexists(folder / name)]
    if not there:
        return
    try:
        own = "rows" in json.loads((folder / names[0]).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        own = False
    if not own or not all((folder / name).is_file() for name in there):
        raise SettingsError(
            f"--out must be a new folder or one with an earlier report, got {folder}, whose "
            f"{there[0]} is not from a report; use another folder"
        )


def write_report(report: Evaluated, folder: Path) -> tuple[Path, Path]:
    """Write `evaluation.json` and `evaluation.md` into the folder, making it if needed. An earlier
    report there of other players, games or steps is renamed, and a line says so."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "evaluation.json", folder / "evaluation.md"
    held = plain_json(paths[0].read_bytes()) if paths[0].is_file() else report.facts
    if any(held.get(name) != report.facts.get(name) for name in ("asked", "step")):
        number = next(n for n in count(1) if not (folder / f"evaluation_{n}.json").exists())
        for path in filter(Path.exists, (*paths, folder / "config.yaml")):
            path.rename(path.with_stem(f"{path.stem}_{number}"))
        print(f"{paths[0]} is now evaluation_{number}.json: it is of other players, games or steps")
    write_atomically(paths[0], json.dumps(as_json(report), indent=1) + "\n")
    write_atomically(paths[1], markdown(report))
    return paths


def _kinds(row: Row) -> str:
    kinds = {n: v for n, v in row.measures.items() if n.startswith(_ERRORS)}
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.removeprefix(_ERRORS)} {value:.3f}" for name, value in ranked)
