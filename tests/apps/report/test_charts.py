"""Figures of several runs: what is drawn, and what is left out."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from selfplay.apps.report.charts import Line, curves_svg, line_chart, smoothed

SVG = "{http://www.w3.org/2000/svg}"


def rows(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * i, "score": v} for i, v in enumerate(values)]


def texts_of(svg: str) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_axis_holds_the_interval_of_a_value() -> None:
    points = [{"step": step, "score": 0.5, "score_low": 0.1, "score_high": 0.9} for step in (0, 1)]
    bare = [{"step": step, "score": 0.5} for step in (0, 1)]
    drawn, plain = (texts_of(curves_svg({"a": p}, y="score", title="t")) for p in (points, bare))
    assert {"0.1", "0.9"} <= set(drawn) and not {"0.1", "0.9"} & set(plain)


def test_missing_and_non_finite_values_are_left_out() -> None:
    runs = {"a": [*rows(0.1, None, float("nan"), 0.4), {"step": 50}], "empty": rows(None)}
    svg = curves_svg(runs, y="score", title="t")
    assert "empty" not in svg
    assert svg == curves_svg(
        {"a": [rows(0.1)[0], {"step": 30, "score": 0.4}]}, y="score", title="t"
    )
    with pytest.raises(ValueError, match="needs rows with 'entropy'"):
        curves_svg(runs, y="entropy", title="t")


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
    assert drawn(32.0, at=0)[1] == "nats", "a loss begins far above"
    (_, high), note = drawn(5.0)
    assert note == "nats" and high > 5.0


def test_the_values_under_the_pointer_are_those_of_the_steps() -> None:
    points = [(float(step), 10.0 if step == 9 else 2.34567e-7) for step in range(20)]
    thick = smoothed(points)
    for line in (Line("a", thick, "red", faint=points), Line("a", thick, "red", tooltip=points)):
        chart = line_chart("t", [line])
        assert chart is not None
        told = chart.lines[0]["points"]
        assert told[9] == [9.0, 10.0] and told[0] == [0.0, 2.3457e-7] and len(told) == 20
