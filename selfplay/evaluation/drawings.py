"""Draws a recorded game as text for a terminal and learning curves as an SVG.

Units are characters and pixels; numbers are shown as logged. Reads records of `games.jsonl` and
`metrics.jsonl` as plain dicts. Never sees torch or the rules of a game.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from dialop.shown import on_one_line, printable

# Eight colours that colour-blind readers can tell apart (Okabe and Ito, 2008), yellow last.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
_DASHES = ("", "6 3", "2 3")
_MAX_DOTTED = 40


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
    branches = {branch["turn"]: branch for branch in record.get("branches", ())}
    for number, turn in enumerate(record["turns"]):
        lines += _turn(names[turn["seat"]], turn, margin=margin, width=width)
        if number in branches:
            lines += _branch(branches[number], margin=margin, width=width)
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


def _branch(branch: Mapping[str, Any], *, margin: int, width: int) -> Iterator[str]:
    """The siblings of the turn above, one line each: value, scores, text.

    The turn of the played game comes first, with the score of that game first.
    """
    siblings = branch["siblings"]
    most = max(len(sibling["scores"]) for sibling in siblings)
    mean = sum(sibling["value"] for sibling in siblings) / len(siblings)
    head = f"{len(siblings)} turns tried here, mean {mean:.3f}:"
    yield " " * margin + head
    for number, sibling in enumerate(siblings):
        mark = ">" if number == 0 else " "
        scores = "" if most == 1 else f" ({', '.join(f'{s:.2f}' for s in sibling['scores'])})"
        start = f"{mark} {sibling['value']:.3f}{scores} {'✗ ' if sibling['error'] else ''}"
        text = " / ".join(_printable(sibling["text"]).split("\n")) or "(nothing)"
        first, *rest = textwrap.wrap(text, max(20, width - margin - len(start))) or [""]
        yield " " * margin + start + first
        yield from (" " * (margin + len(start)) + line for line in rest)


def _outcome(record: Mapping[str, Any]) -> str:
    parts = ["agreed" if record["agreed"] else "no agreement"]
    if record.get("ended") not in (None, "agreed"):
        parts.append(f"ended by {record['ended']}")
    parts.append(f"score {record['score_norm']:.3f} of the best")
    num_errors = sum(bool(turn["error"]) for turn in record["turns"])
    parts.append(f"{len(record['turns'])} turns, {num_errors} refused")
    facts = ", ".join(f"{name} {value:.4g}" for name, value in record["facts"].items())
    return "; ".join(parts) + (f" ({facts})" if facts else "")


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear scale from values to pixels, with round tick values inside its ends."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[float, ...]

    def px(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start_px + share * (self.end_px - self.start_px)


def learning_curve_svg(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    y: str,
    title: str,
    alike: Mapping[str, str] | None = None,
) -> str:
    """A line chart of metric `y` against `step`, one line a run, as a complete SVG text.

    `alike` maps runs to a common name: runs with the same name share a colour and one entry of the
    legend.

    Rows without a finite `y` are left out. The background is white, so that the chart can be read
    on a dark page, too. Raises ValueError if nothing is left to draw.
    """
    lines = {name: _points(rows, y) for name, rows in runs.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        raise ValueError(f"learning_curve_svg needs rows with {y!r}, got none in {list(runs)}")
    kinds = {name: alike[name] if alike else name for name in lines}
    entries = list(dict.fromkeys(kinds.values()))
    legend_px = 40 + 7 * max(len(entry) for entry in entries)
    width, height = 560 + legend_px, max(340, 60 + 20 * len(entries))
    left, top, bottom = 64, 40, 292
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    across = _axis(steps, start_px=left, end_px=540, snug=True)
    up = _axis(values, start_px=bottom, end_px=top, snug=False)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" role="img" '
        f"aria-label={quoteattr(on_one_line(title))}>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(left, 24, title, extra='font-size="14" font-weight="bold"'),
        *_grid(across, up),
        _text((left + 540) / 2, 330, "step", extra='text-anchor="middle"'),
        _text(0, 0, y.replace("_", " "), extra=f'text-anchor="middle" {_sideways(16, 166)}'),
    ]
    for name, points in lines.items():
        number = entries.index(kinds[name])
        parts += _line(number, [(across.px(s), up.px(v)) for s, v in points])
    for number, entry in enumerate(entries):
        parts += _entry(number, entry)
    return "\n".join([*parts, "</svg>"]) + "\n"


def drift_svg(history: Sequence[tuple[int, float, float]], *, partner: str) -> str:
    """A run's self-play score and its score with the drift monitor's partner over steps, as an SVG
    text. `history` holds (step, self-play score, score with the partner)."""
    runs = {
        "by itself": [{"step": step, "score": alone} for step, alone, _ in history],
        f"with {partner}": [{"step": step, "score": paired} for step, _, paired in history],
    }
    return learning_curve_svg(runs, y="score", title="Self-play and play with a fixed partner")


def _points(rows: Sequence[Mapping[str, Any]], y: str) -> list[tuple[float, float]]:
    return [
        (float(row["step"]), float(value))
        for row in rows
        if isinstance(value := row.get(y), int | float) and math.isfinite(value)
    ]


def _axis(values: Sequence[float], *, start_px: float, end_px: float, snug: bool) -> _Axis:
    """An axis over the values with about five ticks, 1, 2 or 5 times a power of ten apart.

    A `snug` axis ends at the extreme values, others at the ticks around them.
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(step * i, 10) for i in range(first, last + 1)]
    if snug:
        ticks = [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9]
    else:
        low, high = ticks[0], ticks[-1]
    return _Axis(low, high, start_px, end_px, tuple(ticks))


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    for tick in up.ticks:
        at = up.px(tick)
        yield (
            f'<line x1="{across.start_px:.1f}" x2="{across.end_px:.1f}" y1="{at:.1f}" '
            f'y2="{at:.1f}" stroke="#dddddd"/>'
        )
        yield _text(across.start_px - 8, at + 4, f"{tick:g}", extra='text-anchor="end"')
    for tick in across.ticks:
        at, floor = across.px(tick), up.start_px
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 5}" stroke="#555555"/>'
        yield _text(at, floor + 19, f"{tick:g}", extra='text-anchor="middle"')
    yield (
        f'<path d="M{across.start_px:.1f} {up.end_px:.1f}V{up.start_px:.1f}'
        f'H{across.end_px:.1f}" fill="none" stroke="#555555"/>'
    )


def _line(number: int, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    """The line of one run, with dots if it has few points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" {_pen(number)}/>'
    if len(points) <= _MAX_DOTTED:
        colour = _COLOURS[number % len(_COLOURS)]
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'


def _entry(number: int, name: str) -> Iterator[str]:
    """A line of the legend."""
    at = 52 + 20 * number
    yield f'<line x1="556" x2="580" y1="{at}" y2="{at}" {_pen(number)}/>'
    yield _text(586, at + 4, name)


def _pen(number: int) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    pen = f'stroke="{colour}" stroke-width="2"'
    return pen + (f' stroke-dasharray="{dash}"' if dash else "")


def _text(x: float, y: float, text: str, *, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="#222222" {extra}>{escape(on_one_line(text))}</text>'


def _sideways(x: float, y: float) -> str:
    return f'transform="translate({x:g} {y:g}) rotate(-90)"'
