"""Shows a recorded game, a record of `games.jsonl`, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from dialop.shown import on_one_line, printable


def game_text(record: Mapping[str, Any], *, width: int = 100) -> str:
    """One record of games.jsonl as text: rules, private views, turns, outcome.

    Views stand side by side if they fit in `width` columns, else one below the other. A refused
    move is marked with ✗ and followed by its error. Control characters, which could act on a
    terminal, show as `·`.
    """
    seats = record["seats"]
    names = [f"seat {i} ({on_one_line(seat['player'])})" for i, seat in enumerate(seats)]
    name = on_one_line(str(record["instance"]))
    lines = [f"Game {name}, episode {record['episode']}, step {record['step']}"]
    systems = [_printable(seat["system"]) for seat in seats]
    views = [_printable(seat["user"]) for seat in seats]
    if len(set(systems)) == 1:
        lines += _section("rules", systems[0], width) if systems[0] else []
    else:
        views = ["\n\n".join(p for p in pair if p) for pair in zip(systems, views, strict=True)]
    lines += _views(names, views, width)
    lines += ["", _rule("talk", width)]
    margin = max(len(name) for name in names) + 4
    for turn in record["turns"]:
        lines += _turn(names[turn["seat"]], turn, margin=margin, width=width)
    lines += [_rule("outcome", width), *_wrapped(_outcome(record), width)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _printable(text: str) -> str:
    """Text without control characters and without the page's own rule character."""
    return printable(text).replace("─", "-")


def _rule(title: str, width: int) -> str:
    return f"── {title} ".ljust(width, "─")


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; keeps the text's own line breaks and blank lines."""
    return [part for line in text.split("\n") for part in textwrap.wrap(line, width) or [""]]


def _section(title: str, text: str, width: int) -> list[str]:
    return ["", _rule(title, width), *_wrapped(text, width)]


def _views(names: Sequence[str], views: Sequence[str], width: int) -> list[str]:
    blocks = [text.split("\n") for text in views]
    column = (width - 3 * (len(views) - 1)) // len(views)
    if any(len(line) > column for block in blocks for line in block):
        pages = zip(names, views, strict=True)
        return [line for name, text in pages for line in _section(f"{name} sees", text, width)]
    titles = " ┬ ".join(f"{name} sees ".ljust(column, "─") for name in names)
    rows = zip_longest(*blocks, fillvalue="")
    return ["", titles, *(" │ ".join(cell.ljust(column) for cell in row) for row in rows)]


def _turn(name: str, turn: Mapping[str, Any], *, margin: int, width: int) -> Iterator[str]:
    """One turn after its seat's name, then its error."""
    mark = "✗" if turn["error"] else " "
    columns = max(20, width - margin)
    head = f"{name} {mark}".ljust(margin)
    for i, line in enumerate(_wrapped(_printable(turn["text"]) or "(nothing)", columns)):
        yield (head if i == 0 else " " * margin) + line
    if turn["error"]:
        for line in _wrapped(f"refused: {_printable(turn['error'])}", columns):
            yield " " * margin + line


def _outcome(record: Mapping[str, Any]) -> str:
    parts = ["agreed" if record["agreed"] else "no agreement"]
    if record.get("ended") not in (None, "finished"):
        parts.append(f"ended by {record['ended']}")
    parts.append(f"score {record['score_norm']:.3f} of the best")
    num_errors = sum(bool(turn["error"]) for turn in record["turns"])
    parts.append(f"{len(record['turns'])} turns, {num_errors} refused")
    facts = ", ".join(f"{name} {value:.4g}" for name, value in record["facts"].items())
    return "; ".join(parts) + (f" ({facts})" if facts else "")
