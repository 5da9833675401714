"""Reports of an evaluation: a table for the terminal, a Markdown page, a JSON file.

Means are per game; scores are shares of the best possible value. Plays no games.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dialop.shown import escaped, fenced, on_one_line
from selfplay.evaluation.drawings import game_text
from selfplay.evaluation.evaluate import Evaluation
from selfplay.metrics.bootstrap import show_interval
from selfplay.metrics.columns import columns_of
from selfplay.metrics.run_folder import write_atomically

_ERRORS = "errors_"


@dataclass(frozen=True, slots=True)
class Page:
    """One evaluation: its facts, and a row for each pair of players on the same instances."""

    title: str
    facts: dict[str, Any]
    rows: dict[str, Evaluation]


def columns(rows: Mapping[str, Evaluation]) -> list[tuple[str, str, str]]:
    """The columns that at least one of these rows has."""
    return columns_of(row.measures for row in rows.values())


def table_text(rows: Mapping[str, Evaluation]) -> str:
    """One line per pair for a terminal: score with its 95 % interval, then means per game."""
    rows = {on_one_line(name): row for name, row in rows.items()}
    width = max(len(name) for name in rows)
    head = f"{'':{width}}  {'score [95 %]':22}"
    lines = [head + "".join(f"{heading:>11}" for _, heading, _ in columns(rows))]
    for name, row in rows.items():
        cells = "".join(f"{_cell(row, measure):>11}" for measure, _, _ in columns(rows))
        lines.append(f"{name:{width}}  {show_interval(row.interval):22}{cells}")
    return "\n".join(line.rstrip() for line in lines)


def games_text(rows: Mapping[str, Evaluation]) -> str:
    """The best, typical and worst game of every policy's row, for a terminal."""
    return "\n".join(
        f"=== {on_one_line(name)}: {label} game\n{game_text(record)}"
        for name, row in rows.items()
        if name.startswith("policy")
        for label, record in row.examples.items()
    )


def errors_text(rows: Mapping[str, Evaluation]) -> str:
    """Refused moves per game by kind, one line per pair that made any; "" if none did."""
    lines = [
        f"{on_one_line(name)}: {kinds}" for name, row in rows.items() if (kinds := _kinds(row))
    ]
    return "\n".join(lines)


def markdown(page: Page) -> str:
    """The page: facts, table, its legend, errors by kind, example games."""
    lines = [f"# {escaped(page.title)}", ""]
    lines += [f"- {name}: {escaped(str(value))}" for name, value in page.facts.items()]
    lines += ["", *_markdown_table(page.rows), ""]
    legend = "; ".join(f"*{heading}* {meaning}" for _, heading, meaning in columns(page.rows))
    lines += [
        "Score: mean share of the best possible value, 0 without an agreement, with a bootstrap "
        f"95 % interval over games. Means per game: {legend}."
    ]
    if errors := errors_text(page.rows):
        lines += ["", "## Errors per game by kind", ""]
        lines += [f"- {escaped(line)}" for line in errors.split("\n")]
    for name, row in page.rows.items():
        if name.startswith("policy"):
            for label, record in row.examples.items():
                lines += ["", f"## {label.capitalize()} game of {escaped(name)}", ""]
                lines += [fenced(game_text(record))]
    return "\n".join(lines) + "\n"


def as_json(page: Page) -> dict[str, Any]:
    """The page as plain values; a row's scores are in the order of the instances."""
    return {**page.facts, "rows": rows_json(page.rows)}


def rows_json(rows: Mapping[str, Evaluation]) -> dict[str, Any]:
    return {name: asdict(row) for name, row in rows.items()}


def write_page(page: Page, folder: Path) -> list[Path]:
    """Write `evaluation.json` and `evaluation.md` into the folder, making it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "evaluation.json", folder / "evaluation.md"]
    write_atomically(paths[0], json.dumps(as_json(page), indent=1) + "\n")
    write_atomically(paths[1], markdown(page))
    return paths


def _markdown_table(rows: Mapping[str, Evaluation]) -> list[str]:
    headings = ["", "score [95 %]", *(heading for _, heading, _ in columns(rows))]
    lines = [table_row(headings), table_row(["---", *["--:"] * (len(headings) - 1)])]
    for name, row in rows.items():
        cells = [_cell(row, measure) for measure, _, _ in columns(rows)]
        lines.append(table_row([escaped(name), show_interval(row.interval), *cells]))
    return lines


def table_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _cell(row: Evaluation, measure: str) -> str:
    """A mean with three decimals; a dash if it was not measured."""
    return f"{row.measures[measure]:.3f}" if measure in row.measures else "-"


def _kinds(row: Evaluation) -> str:
    kinds = {n: v for n, v in row.measures.items() if n.startswith(_ERRORS)}
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.removeprefix(_ERRORS)} {value:.3f}" for name, value in ranked)
