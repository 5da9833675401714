"""Charts of the page: what sets an axis, and the values under the pointer."""

from __future__ import annotations

import re

import pytest

from selfplay.apps.report.charts import Chart, Line, line_chart, smoothed


def test_a_far_value_is_marked_above_an_axis_that_the_others_set() -> None:
    """0 to 0.99 in 100 steps: quantiles 0.0495 and 0.95, so above 5.45 is far and 1.85 the top."""
    values = [(float(step), step / 100) for step in range(100)]

    def drawn(spike: float, at: int = 50) -> tuple[tuple[float, float], str]:
        points = [*values[:at], (float(at), spike), *values[at + 1 :]]
        chart = line_chart("t", [Line("a", smoothed(points), "red", faint=points)], note="nats")
        assert chart is not None and [float(at), spike] in chart.lines[0]["points"]
        return chart.y, chart.note

    (low, high), note = drawn(32.0)
    assert note == "nats; ▲ 1 above the axis, up to 32"
    assert high == pytest.approx(1.8505 * 1.05) and low == pytest.approx(-1.8505 * 0.05)
    (_, high), note = drawn(5.0)
    assert note == "nats" and high > 5.0


def test_a_heavy_tail_of_positive_values_has_a_logarithmic_axis() -> None:
    """1 in all steps but one, of 31: more than 30 medians. The largest of 0.1 nats and the mean of
    1e-7 are both readable. A value of 0 has no place on such an axis."""

    def drawn(*lines: list[float]) -> Chart:
        points = [[(float(step), value) for step, value in enumerate(own)] for own in lines]
        chart = line_chart("t", [Line("a", own, "red", faint=own) for own in points])
        assert chart is not None
        return chart

    heavy, even, zero = (
        drawn([1.0] * 9 + [31.0]),
        drawn([1.0] * 9 + [29.0]),
        drawn([0.0, 1.0, 31.0]),
    )
    assert [chart.note for chart in (heavy, even)] == ["log axis", ""] != zero.note
    assert zero.y[0] < 0
    assert heavy.y[0] > 0.5 and heavy.y[1] < 100
    apart = drawn([1e-7, 2e-7], [0.1, 0.2])
    assert apart.note == "log axis" and 1e-8 < apart.y[0] < 1e-7 < 0.2 < apart.y[1] < 1
    assert apart.label == "t, steps 0 to 1: a from 1e-07 to 2e-07; a from 0.1 to 0.2"


def test_lines_that_lie_on_each_other_take_turns() -> None:
    """Three lines within 1 % of the range 0 to 9, a fourth one elsewhere: each of the three is
    seen for a third of a period, one after the other. In matplotlib a dash is 1.6 times its width
    of 4 points, so a period is 19.2."""
    steps = [float(step) for step in range(10)]
    three = [Line(str(n), [(x, x + 0.01 * n) for x in steps], f"#00000{n}") for n in range(3)]
    other = Line("other", [(x, 9.0 - x) for x in steps], "#00000a")
    chart = line_chart("t", [*three, other])
    assert chart is not None
    dashes = r"stroke-dasharray: ([\d.]+),([\d.]+); stroke-dashoffset: ([\d.]+); stroke: #00000(\w)"
    found = {
        name: (float(on), float(off), float(at))
        for on, off, at, name in re.findall(dashes, chart.svg)
    }
    assert found.keys() == {"0", "1", "2"}
    assert {(on, off) for on, off, _ in found.values()} == {(6.4, 12.8)}
    begins = [-at % 19.2 for *_, at in found.values()]
    assert begins == pytest.approx([0.0, 6.4, 12.8])


def test_the_values_under_the_pointer_are_those_of_the_steps() -> None:
    points = [(float(step), 10.0 if step == 9 else 2.34567e-7) for step in range(20)]
    thick = smoothed(points)
    for line in (Line("a", thick, "red", faint=points), Line("a", thick, "red", tooltip=points)):
        chart = line_chart("t", [line])
        assert chart is not None
        told = chart.lines[0]["points"]
        assert told[9] == [9.0, 10.0] and told[0] == [0.0, 2.3457e-7] and len(told) == 20


def test_a_line_breaks_at_its_gaps_and_a_step_alone_is_a_dot() -> None:
    """Steps 1, 2, 3 and 9 of a policy that rests from 4 to 8: a line of three points and a dot; the
    pointer reads the four values."""
    points = [(1, 1.0), (2, 2.0), (3, 1.5), (9, 2.5)]
    whole, broken = (
        line_chart("Entropy", [Line("one", points, "#123456", gaps=gaps)])
        for gaps in ((), range(4, 9))
    )
    assert whole is not None and broken is not None

    def drawn(chart: Chart) -> list[int]:
        """Strokes of the line, their points after the first, and dots."""
        (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: #123456; stroke-w', chart.svg)
        dots = re.findall(r"<use[^>]*stroke: #123456", chart.svg)
        return [path.count("M"), path.count("L"), len(dots)]

    assert drawn(whole) == [1, 3, 0] and drawn(broken) == [2, 2, 1]
    assert broken.lines == whole.lines and len(broken.lines[0]["points"]) == 4
