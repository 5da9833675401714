"""The wording of scripted players' moves: several phrasings in the full style, one in the brief
style.

`statements.stated_cells` parses every phrasing of cell values exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dialop.matching.board import MatchingView
from dialop.matching.proposal import Pairs, render_proposal
from dialop.matching.roster import first_name, short_title
from dialop.matching.texts import cell_lines

Cell = tuple[int, int]
Listing = Callable[[Mapping[Cell, int], MatchingView, bool], str]

_OPENERS = (
    "Here is what I see.",
    "Hi! These are the values on my side.",
    "My numbers are as follows.",
    "Let me share my table.",
    "This is all I can offer.",
    "",
)
_CLOSERS = (
    "",
    "What does yours look like?",
    "Please take that into account.",
    "Feel free to propose.",
    "Your turn.",
)
_NOTHING = ("I see nothing useful here.", "My table is empty.", "All my cells are hidden.")
_NOTHING_BRIEF = "none"


def proposal(pairs: Pairs, view: MatchingView) -> str:
    """A proposal move in the form of the rules, its lines in the order of `pairs`."""
    people, papers, brief = view.reviewers, view.papers, view.options.brief
    text = render_proposal(pairs, people, papers=papers, brief=brief, as_given=True)
    return f"[propose]\n{text}"


def message(cells: Mapping[Cell, int], view: MatchingView, *, rng: np.random.Generator) -> str:
    """A message that states cells, {(reviewer, paper): displayed value}."""
    if view.options.brief:
        # The same lines as in the table, because a small model learns copying more easily.
        lines = [_flat({cell: value}, view, False) for cell, value in cells.items()]
        return "\n".join(["[message]", *(lines or [_NOTHING_BRIEF])])
    if not cells:
        return f"[message] {_NOTHING[rng.integers(len(_NOTHING))]}"
    opener = _OPENERS[rng.integers(len(_OPENERS))]
    listing = _LISTINGS[rng.integers(len(_LISTINGS))]
    closer = _CLOSERS[rng.integers(len(_CLOSERS))]
    body = listing(cells, view, bool(rng.random() < 0.5))
    if closer.endswith("?") and body[-1].isdigit():  # values in a question are not parsed
        body += "."
    text = " ".join(filter(None, (opener, body, closer)))
    return "[message] " + text.replace(" \n", "\n").replace("\n ", "\n").strip()


def thoughts(table_RP: NDArray[np.int_], view: MatchingView) -> str:
    """A full table as private lines before a move, in the wording of the brief style's table."""
    return cell_lines(table_RP.tolist(), view.reviewers, papers=view.papers) + "\n"


def estimate(
    table_RP: NDArray[np.int_],
    view: MatchingView,
    stated: Mapping[Cell, int],
    *,
    tops: tuple[float, float],
) -> str:
    """A table of levels as private lines with the source of each level: `Ava BLEU 476=8`,
    `theirs 476=8` for a stated value, `?=5` for a cell that neither seat has named.

    `tops` are the upper ends of both seats' values, each in its own units; the first line has them,
    rounded to tens.
    """
    source = {cell: f"theirs {value}" for cell, value in stated.items()}
    rows = [
        [
            f"{source.get((r, p), '?') if own is None else own}={table_RP[r, p]}"
            for p, own in enumerate(row)
        ]
        for r, row in enumerate(view.displayed)
    ]
    mine, theirs = (10 * round(top / 10) for top in tops)
    heard = f", theirs at {theirs}" if stated else ""
    lines = cell_lines(rows, view.reviewers, papers=view.papers)
    return f"Mine end at {mine}{heard}:\n{lines}\n"


def choices(pairs: Pairs, table_RP: NDArray[np.int_], view: MatchingView) -> list[str]:
    """One private line for each chosen pair, with its level: `Ava BLEU 8`."""
    return [_flat({pair: int(table_RP[pair])}, view, False) for pair in pairs]


def trial(pairs: Pairs, view: MatchingView) -> str:
    """The private lines of a trial plan, in the wording of the brief style's proposals."""
    lines = render_proposal(pairs, view.reviewers, papers=view.papers, brief=True, as_given=True)
    return f"{lines}\n"


def malformed(text: str, *, rng: np.random.Generator) -> str:
    """The same move with an injected error: a missing or wrong tag, or a proposal that is not a
    matching."""
    tag, _, content = text[1:].partition("]")
    if tag != "propose":
        return content.strip() or tag
    lines = text.split("<br/>" if "<br/>" in text else "\n")
    kind = rng.integers(4)
    if kind == 0:
        return content.strip()
    if kind == 1:
        return f"[proposal]{content}"
    if kind == 2:
        return "\n".join(lines[:-1])
    reviewer = lines[-2].rpartition(":")[2]
    return "\n".join([*lines[:-1], f"{lines[-1].rpartition(':')[0]}:{reviewer}"])


def _name(view: MatchingView, reviewer: int, full: bool) -> str:
    return view.reviewers[reviewer] if full else first_name(view.reviewers[reviewer])


def _one_by_one(
    form: str, between: str, end: str, cells: Mapping[Cell, int], view: MatchingView, full: bool
) -> str:
    """The cells in table order, each written in this form."""
    each = (
        form.format(r=_name(view, r, full), p=short_title(view.papers[p]), v=value)
        for (r, p), value in cells.items()
    )
    return between.join(each) + end


# Ava BLEU 87, Daniel Electra 12
_flat: Listing = partial(_one_by_one, "{r} {p} {v}", ", ", "")


def _by_reviewer(
    form: str, between: str, cells: Mapping[Cell, int], view: MatchingView, full: bool
) -> list[tuple[str, str]]:
    """Each reviewer with its cells, each cell written in this form."""
    rows: dict[int, list[str]] = {}
    for (r, p), v in cells.items():
        rows.setdefault(r, []).append(form.format(p=short_title(view.papers[p]), v=v))
    return [(_name(view, r, full), between.join(row)) for r, row in rows.items()]


def _lines(cells: Mapping[Cell, int], view: MatchingView, full: bool) -> str:
    """One line per reviewer: Ava: BLEU 87, Electra 12"""
    rows = _by_reviewer("{p} {v}", ", ", cells, view, full)
    return "\n" + "\n".join(f"{name}: {row}" for name, row in rows) + "\n"


def _has(cells: Mapping[Cell, int], view: MatchingView, full: bool) -> str:
    """Ava has 87 on BLEU and 12 on Electra. Daniel has 3 on BLEU."""
    rows = _by_reviewer("{v} on {p}", " and ", cells, view, full)
    return " ".join(f"{name} has {row}." for name, row in rows)


def _by_paper(cells: Mapping[Cell, int], view: MatchingView, full: bool) -> str:
    """BLEU: Ava 87, Daniel 12. Electra: Ava 3."""
    parts = []
    for paper in sorted({p for _, p in cells}):
        column = [f"{_name(view, r, full)} {v}" for (r, p), v in cells.items() if p == paper]
        parts.append(f"{short_title(view.papers[paper])}: {', '.join(column)}.")
    return " ".join(parts)


_LISTINGS: tuple[Listing, ...] = (
    _flat,
    partial(_one_by_one, "{r} on {p} is {v}", ", ", "."),
    partial(_one_by_one, "{v} for {r} on {p}", "; ", "."),
    _lines,
    _by_paper,
    _has,
)
