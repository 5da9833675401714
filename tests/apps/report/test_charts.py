"""Charts of the page: what sets an axis, and the values under the pointer."""

from __future__ import annotations

import pytest

from selfplay.apps.report.charts import Line, line_chart, smoothed


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
