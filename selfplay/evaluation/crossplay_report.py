"""Reports of a cross-play matrix: text for the terminal, a Markdown page, a JSON file.

Scores are shares of the best possible value, one per game, on the same instances in every cell.
Plays no games.
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
from selfplay.evaluation.report import escaped, table_row
from selfplay.metrics.bootstrap import bootstrap_interval, show_interval
from selfplay.metrics.run_folder import write_atomically

HOW_TO_READ = (
    "Score of the row's player with the column's, with a 95 % interval over games. The row's "
    "player has seat 0 in the upper line, seat 1 in the lower one, and both seats with itself."
)
_LOST = (
    "Lost to each other: the mean of the two self-play scores minus the mean of the two cross-play "
    "scores, paired by instance. Above 0 each player does better with itself than with the other."
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of players. `cells[one, other]` holds the games with `one` in seat 0 and `other` in
    seat 1; each pair of a row and a column has both orders of seats."""

    facts: dict[str, Any]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Evaluation]


def lost_together(matrix: Matrix) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Self-play score minus cross-play score of each two players, as (mean, low, high) over
    instances.

    An instance gives (s_aa + s_bb) / 2 - (s_ab + s_ba) / 2 (Hu et al. 2020, "Other-Play"), where
    s_ab is the score with a in seat 0. Pairs without both self-play cells are left out, and pairs
    whose four cells lack an instance because of a void game.
    """
    intervals = {}
    with_self_play = [name for name in matrix.columns if (name, name) in matrix.cells]
    for one, other in combinations(with_self_play, 2):
        pairs = [(one, one), (other, other), (one, other), (other, one)]
        if not all(pair in matrix.cells for pair in pairs):
            continue
        scores = [matrix.cells[pair].scores for pair in pairs]
        if len({len(row) for row in scores}) == 1:
            losses = [(aa + bb - ab - ba) / 2 for aa, bb, ab, ba in zip(*scores, strict=True)]
            intervals[one, other] = bootstrap_interval(losses, seed=0)
    return intervals


def matrix_text(matrix: Matrix) -> str:
    """The matrix for a terminal, two lines per row, then the loss of each pair."""
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
    """The same as a Markdown page, after the facts of the evaluation."""
    lines = ["# Cross-play", ""]
    lines += [f"- {name}: {escaped(str(value))}" for name, value in matrix.facts.items()]
    lines += ["", table_row(["", "seat", *map(escaped, matrix.columns)])]
    lines += [table_row(["---", "---", *["--:"] * len(matrix.columns)])]
    for row in matrix.rows:
        lines.append(table_row([escaped(row), "0", *_line(matrix, row, 0)]))
        lines.append(table_row(["", "1", *_line(matrix, row, 1)]))
    lines += ["", HOW_TO_READ]
    if lost := lost_together(matrix):
        lines += ["", _LOST, "", table_row(["pair", "lost [95 %]"]), table_row(["---", "--:"])]
        lines += [
            table_row([escaped(f"{one} and {other}"), show_interval(interval)])
            for (one, other), interval in lost.items()
        ]
    return "\n".join(lines) + "\n"


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Everything as plain values; a cell's scores are in the order of the instances."""
    return {
        **matrix.facts,
        "rows": list(matrix.rows),
        "columns": list(matrix.columns),
        "cells": [
            {
                "seat_0": one,
                "seat_1": other,
                "interval": list(cell.interval),
                "measures": cell.measures,
                "scores": list(cell.scores),
                "examples": cell.examples,
            }
            for (one, other), cell in matrix.cells.items()
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
    """A row's cells with its player in `seat`. Self-play stands in the line of seat 0 only."""
    pairs = [(row, column) if seat == 0 else (column, row) for column in matrix.columns]
    return [
        "" if seat == 1 and one == other else show_interval(matrix.cells[one, other].interval)
        for one, other in pairs
    ]
