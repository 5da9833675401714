"""The cross-play matrix as people read it: text for the terminal, a Markdown page, a JSON file.

Scores are shares of the best possible value, one a game, of the same instances in every cell. Plays
nothing and knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from dialop.shown import on_one_line
from selfplay.evaluation.evaluate import Evaluation
from selfplay.evaluation.report import escaped
from selfplay.metrics.bootstrap import bootstrap_interval, show_interval
from selfplay.metrics.run_folder import write_atomically

HOW_TO_READ = (
    "Score of the row's player with the column's, with a 95 % interval over games; above in seat "
    "0, below in seat 1. With itself a player has both seats."
)
_LOST = (
    "Lost to each other: the mean of the two self-play scores minus the mean of the two scores "
    "together, instance by instance. Above 0 the two understand themselves better than each other."
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Who played with whom: `cells[one, other]` are the games with `one` in seat 0 and `other` in
    seat 1; every row and column has both seatings."""

    facts: dict[str, Any]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Evaluation]


def lost_together(matrix: Matrix) -> dict[tuple[str, str], tuple[float, float, float]]:
    """For each two players that also played with themselves: how much of their self-play scores
    they lose with each other, as (mean, low, high) over instances.

    An instance gives (s_aa + s_bb) / 2 - (s_ab + s_ba) / 2, s_ab being the score with a in seat 0:
    self-play less cross-play (Hu et al. 2020, "Other-Play"), paired by instance. Left out where a
    void game took an instance from one of the four.
    """
    found = {}
    alone = [name for name in matrix.columns if (name, name) in matrix.cells]
    for one, other in combinations(alone, 2):
        pairs = [(one, one), (other, other), (one, other), (other, one)]
        if not all(pair in matrix.cells for pair in pairs):
            continue
        scores = [matrix.cells[pair].scores for pair in pairs]
        if len({len(row) for row in scores}) == 1:
            gaps = [(aa + bb - ab - ba) / 2 for aa, bb, ab, ba in zip(*scores, strict=True)]
            found[one, other] = bootstrap_interval(gaps, seed=0)
    return found


def matrix_text(matrix: Matrix) -> str:
    """The matrix for a terminal, two lines a row, then what each pair loses together."""
    lines = [*_grid(matrix), "", HOW_TO_READ]
    if lost := lost_together(matrix):
        names = [on_one_line(f"{one} and {other}") for one, other in lost]
        width = max(len(name) for name in names)
        lines += ["", _LOST]
        lines += [
            f"  {name:{width}}  {show_interval(interval)}"
            for name, interval in zip(names, lost.values(), strict=True)
        ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def matrix_markdown(matrix: Matrix) -> str:
    """The same as a page: what was asked, the matrix, what each pair loses together."""
    lines = ["# Cross-play", "", *_facts(matrix)]
    lines += ["", _row(["", "seat", *map(escaped, matrix.columns)])]
    lines += [_row(["---", "---", *["--:"] * len(matrix.columns)])]
    for row in matrix.rows:
        lines.append(_row([escaped(row), "0", *_line(matrix, row, 0)]))
        lines.append(_row(["", "1", *_line(matrix, row, 1)]))
    lines += ["", HOW_TO_READ]
    if lost := lost_together(matrix):
        lines += ["", _LOST, "", _row(["pair", "lost [95 %]"]), _row(["---", "--:"])]
        lines += [
            _row([escaped(f"{a} and {b}"), show_interval(gap)]) for (a, b), gap in lost.items()
        ]
    return "\n".join(lines) + "\n"


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Everything as plain values, a cell's scores in the order of the instances."""
    return {
        **matrix.facts,
        "rows": list(matrix.rows),
        "columns": list(matrix.columns),
        "cells": [
            {
                "seat_0": one,
                "seat_1": other,
                "interval": list(found.interval),
                "measures": found.measures,
                "scores": list(found.scores),
                "examples": found.examples,
            }
            for (one, other), found in matrix.cells.items()
        ],
        "lost_together": [
            {"players": list(pair), "interval": list(interval)}
            for pair, interval in lost_together(matrix).items()
        ],
    }


def write_matrix(matrix: Matrix, folder: Path) -> list[Path]:
    """Write `crossplay.json` and `crossplay.md` into the folder, making it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "crossplay.json", folder / "crossplay.md"]
    write_atomically(paths[0], json.dumps(matrix_json(matrix), indent=1) + "\n")
    write_atomically(paths[1], matrix_markdown(matrix))
    return paths


def _facts(matrix: Matrix) -> list[str]:
    return [f"- {name}: {escaped(str(value))}" for name, value in matrix.facts.items()]


def _grid(matrix: Matrix) -> list[str]:
    columns = [on_one_line(name) for name in matrix.columns]
    name_width = max(len(on_one_line(name)) for name in matrix.rows)
    width = max(20, *map(len, columns)) + 2
    lines = [" " * (name_width + 8) + "".join(f"{name:{width}}" for name in columns)]
    for row in matrix.rows:
        for seat in (0, 1):
            name = on_one_line(row) if seat == 0 else ""
            cells = "".join(f"{cell:{width}}" for cell in _line(matrix, row, seat))
            lines.append(f"{name:{name_width}} seat {seat} {cells}")
    return lines


def _line(matrix: Matrix, row: str, seat: int) -> Sequence[str]:
    """A row's cells with its player in one seat; its self-play stands in the upper line alone."""
    cells = []
    for column in matrix.columns:
        pair = (row, column) if seat == 0 else (column, row)
        twice = row == column and seat == 1
        cells.append("" if twice else show_interval(matrix.cells[pair].interval))
    return cells


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
