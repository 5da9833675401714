"""Draws line charts as SVG, for a page with a light and a dark theme.

Texts stay text. Ink and grid take the page's colours through CSS variables; the page draws the
legends, so no name of a run or player is part of a drawing.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

# Seven colours that colour-blind readers can distinguish, with contrast to white and to black
# (after Okabe and Ito, 2008).
COLOURS = ("#1f77c4", "#d9652b", "#179e76", "#c45f9b", "#b58a0b", "#4aa3df", "#8a6fd1")
MAX_DOTTED = 40  # points of a line with an interval that are drawn as dots
MAX_POINTS = 500  # of a line; longer ones are thinned
# Placeholders in the drawing that become the page's colours.
_INK, _GRID = "#010203", "#040506"
_THEME = {_INK: "var(--muted)", _GRID: "var(--line)"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "selfplay",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "text.parse_math": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "lines.linewidth": 1.6,
    "lines.markersize": 2.6,
}
_INCHES, _SMALL_INCHES = (4.8, 2.5), (1.9, 1.1)
_LEAST_SPAN = 2e-3  # of a small chart's axis, as a share of its top
_DASH = 4  # points that a line is seen before the next one that lies on it
HEAVY_TAIL = 30.0  # an axis is logarithmic if a value is above this many times the median
_TICKS = (1, 2, 2.5, 5, 10)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: (step, value) points in order. `band` has (step, low, high); `faint` is the noisy
    curve behind it. The values under the pointer are `tooltip`, else `faint`, else the points. The
    line breaks at the steps `gaps`, in order."""

    name: str
    points: Sequence[Point]
    colour: str
    band: Sequence[tuple[float, float, float]] = ()
    faint: Sequence[Point] = ()
    tooltip: Sequence[Point] = ()
    dashed: bool = False
    gaps: Sequence[float] = ()

    @property
    def steps(self) -> Sequence[Point]:
        """The values of the steps, which the points may smooth."""
        return self.tooltip or self.faint or self.points


@dataclass(frozen=True, slots=True)
class Level:
    """A constant reference: a mean with its interval."""

    name: str
    interval: tuple[float, float, float]
    colour: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, and the data for its values under the pointer.

    `box` is (left, top, right, bottom) of the axes in the units of the SVG's viewBox; `x` and `y`
    are the values at its edges. `small` is a chart of the row of a run's health.
    """

    title: str
    svg: str
    legend: list[dict[str, Any]]
    box: tuple[float, float, float, float]
    x: tuple[float, float]
    y: tuple[float, float]
    lines: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    small: bool = False

    @property
    def label(self) -> str:
        """The chart in words, for readers who do not see it: axes, and each line's ends."""
        ends = [
            f"{line['name']} from {line['points'][0][1]:.4g} to {line['points'][-1][1]:.4g}"
            for line in self.lines
        ]
        steps = [step for line in self.lines for step, _ in line["points"]]
        return f"{self.title}, steps {min(steps):g} to {max(steps):g}: {'; '.join(ends)}"


def line_chart(
    title: str,
    lines: Sequence[Line],
    levels: Sequence[Level] = (),
    *,
    note: str = "",
    small: bool = False,
    log: bool = False,
) -> Chart | None:
    """A chart of curves over steps; None if there is nothing to draw. Without intervals, a heavy
    tail does not flatten the rest: the axis is logarithmic, or, where a value is 0 or below, a few
    outliers do not set it and the note counts them. `log` asks for a logarithmic axis of positive
    values without a heavy tail, too."""
    lines = [line for line in lines if line.points or line.faint]
    if not lines:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(small=small)
        for level in levels:
            mean, low, high = level.interval
            axes.axhspan(low, high, color=level.colour, alpha=0.12, linewidth=0)
            axes.axhline(mean, color=level.colour, linewidth=1, linestyle=(0, (4, 2)))
        has_bands = any(line.band for line in lines)
        is_log = not has_bands and _has_log_axis(lines, least=0.0 if log else HEAVY_TAIL)
        for line, style in zip(lines, _styles(lines, is_log=is_log), strict=True):
            if line.band:
                x, low_N, high_N = zip(*thinned(line.band), strict=True)
                axes.fill_between(x, low_N, high_N, color=line.colour, alpha=0.2, linewidth=0)
            if line.faint:
                x, y = zip(*_broken(thinned(line.faint), line.gaps), strict=True)
                axes.plot(x, y, color=line.colour, alpha=0.3, linewidth=0.7)
            if line.points:
                x, y = zip(*_broken(thinned(line.points), line.gaps), strict=True)
                dots = range(len(x)) if len(x) <= MAX_DOTTED and line.band else _alone(y)
                mark: Any = {"marker": "o", "markevery": [*dots]} if dots else {}
                axes.plot(x, y, color=line.colour, linestyle=style, **mark)
        if not has_bands:
            if is_log:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(numticks=4 if small else 6))
                axes.yaxis.set_minor_locator(NullLocator())
            if is_log or small:
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            low, high = axes.get_ylim()
            if (
                small and not is_log and high - low < (least := _LEAST_SPAN * abs(high))
            ):  # it would be 1, 1
                axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
            far = "log axis" if is_log else _cut_off_far(axes, lines)
            note = "; ".join(filter(None, (note, far)))
        return _chart(title, figure, axes, lines, levels, note, small=small)


def _has_log_axis(lines: Sequence[Line], *, least: float) -> bool:
    """Whether the values are positive and one is above `least` times the lowest line's median."""
    values = [[y for _, y in line.steps] for line in lines]
    lowest = min(float(np.median(own)) for own in values)
    every = [y for own in values for y in own]
    return min(every) > 0 and max(every) > least * lowest


def _styles(lines: Sequence[Line], *, is_log: bool) -> list[Any]:
    """The dashes of each line. Lines that lie on each other, within 1 % of the range of all values,
    take turns, so that each colour is seen; a range of 0.2 % counts as flat.

    Two lines are compared where they are drawn, on a logarithmic axis by their logarithms, and only
    if they have the same steps. A style is one of matplotlib: "-" or (offset, (on, off)), points.
    """
    scale = math.log10 if is_log else float
    curves = [{x: scale(y) for x, y in line.points} for line in lines]
    values = [y for curve in curves for y in curve.values()]
    low, high = min(values, default=0.0), max(values, default=0.0)
    near = 0.01 * max(high - low, _LEAST_SPAN * abs(high))

    def style(number: int) -> Any:
        """The dashes of line `number`."""
        own = curves[number]
        same = [
            other
            for other, its in enumerate(curves)
            if its.keys() == own.keys() and all(abs(y - its[x]) <= near for x, y in own.items())
            if not lines[other].dashed
        ]
        later = sum(other > number for other in same)
        return (_DASH * (later + 1), (_DASH, _DASH * (len(same) - 1))) if len(same) > 1 else "-"

    return [(0, (4, 2)) if line.dashed else style(n) for n, line in enumerate(lines)]


def _cut_off_far(axes: Axes, lines: Sequence[Line]) -> str:
    """Limit the axis to most values of each line, and mark the steps above it; returns a note that
    counts them, "" for none.

    A value is an outlier if it is above the 95 % quantile by more than five times the distance of
    the 5 % and 95 % quantiles; then the axis ends one such distance above the 95 % quantile. A line
    that starts above that, as a loss does, is not cut.
    """
    tops, points = [], [(line.colour, *point) for line in lines for point in line.steps]
    for line in lines:
        values = [y for _, y in line.steps]
        low, high = np.quantile(values, 0.05), np.quantile(values, 0.95, method="lower")
        top, far_above = 2 * high - low, high + 5 * (high - low)
        cut = values[0] <= top < far_above < max(values)
        tops.append(top if cut else max(values))
    end, bottom = float(max(tops)), min(y for *_, y in points)
    far = [point for point in points if point[2] > end]
    if not far:
        return ""
    room = 0.05 * (end - bottom)
    axes.set_ylim(bottom - room, end + room)
    for colour, x, _ in far:
        axes.plot(x, end + room, "^", color=colour, markersize=4, clip_on=False)
    return f"▲ {len(far)} above the axis, up to {max(y for *_, y in far):.3g}"


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most MAX_POINTS of the points, evenly spread, including the last one."""
    if len(points) <= MAX_POINTS:
        return list(points)
    return [points[round((i + 1) * len(points) / MAX_POINTS) - 1] for i in range(MAX_POINTS)]


def _broken(points: Sequence[Point], gaps: Sequence[float]) -> list[Point]:
    """The points, with one without a value between two that have a step of `gaps` between them."""
    shown: list[Point] = []
    for step, value in points:
        if shown and bisect_right(gaps, shown[-1][0]) < bisect_left(gaps, step):
            shown.append((step, math.nan))
        shown.append((step, value))
    return shown


def _alone(values: Sequence[float]) -> list[int]:
    """The places of the values that no line joins to another."""
    empty = [True, *map(math.isnan, values), True]
    return [i for i in range(len(values)) if empty[i] and empty[i + 2] and not empty[i + 1]]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean over a centred window of 5 % of the points, at least 5 of them."""
    half = max(5, math.ceil(0.05 * len(points))) // 2
    sums = np.cumsum([0.0, *(y for _, y in points)])
    places = np.arange(len(points))
    first, end = np.maximum(0, places - half), np.minimum(len(points), places + half + 1)
    means = (sums[end] - sums[first]) / (end - first)
    # Rounded, so that equal values stay equal and the axis does not show rounding errors.
    return [(x, float(f"{mean:.10g}")) for (x, _), mean in zip(points, means, strict=True)]


def _axes(*, small: bool) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes: a grid of values, whole steps, few ticks."""
    figure = Figure(figsize=_SMALL_INCHES if small else _INCHES)
    if small:
        figure.subplots_adjust(left=0.25, right=0.97, bottom=0.17, top=0.93)
    else:
        figure.subplots_adjust(left=0.1, right=0.99, bottom=0.1, top=0.97)
    axes = figure.add_subplot()
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=2 if small else 4)
    axes.xaxis.set_major_locator(MaxNLocator(2 if small else 6, integer=True, steps=_TICKS))
    axes.yaxis.set_major_locator(MaxNLocator(3 if small else 5, steps=_TICKS))
    axes.margins(x=0.01)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure, axes


def svg_of(figure: Figure, *, transparent: bool = False) -> str:
    """The figure as SVG, byte for byte the same for equal figures."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=transparent, metadata=nothing)
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def _digits(value: float) -> float:
    """The value with five significant digits."""
    return float(f"{value:.5g}")


def _chart(
    title: str,
    figure: Figure,
    axes: Axes,
    lines: Sequence[Line],
    levels: Sequence[Level],
    note: str,
    *,
    small: bool,
) -> Chart:
    svg = svg_of(figure, transparent=True)
    for placeholder, colour in _THEME.items():
        svg = svg.replace(placeholder, colour)
    # Inches to points, the units of the viewBox, whose y axis points down.
    width, height = (inches * 72 for inches in (_SMALL_INCHES if small else _INCHES))
    place = axes.get_position()
    box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
    shown: list[Line | Level] = [*lines, *levels]
    legend = [
        {"name": each.name, "colour": each.colour, "dashed": getattr(each, "dashed", True)}
        for each in shown
    ]
    under_pointer = [
        {
            "name": line.name,
            "colour": line.colour,
            "points": [[x, _digits(y)] for x, y in thinned(line.steps)],
            "band": [[x, _digits(low), _digits(high)] for x, low, high in thinned(line.band)],
        }
        for line in lines
    ]
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    return Chart(title, svg, legend, box, (low, high), (bottom, top), under_pointer, note, small)
