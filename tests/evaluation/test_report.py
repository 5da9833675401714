"""Recorded games as text, learning curves as SVG."""

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from selfplay.evaluation.drawings import game_text, learning_curve_svg

SVG = "{http://www.w3.org/2000/svg}"


def turn(seat: int, text: str, error: str | None = None) -> dict[str, Any]:
    return {"seat": seat, "text": text, "error": error, "observations": ["", ""], "trained": True}


def record() -> dict[str, Any]:
    """A 2 by 2 game with one refused move, as it comes back from a line of games.jsonl."""
    game = {
        "step": 40,
        "instance": "g12",
        "episode": 3,
        "score_norm": 0.97,
        "agreed": True,
        "ended": "agreed",
        "seats": [
            {"player": "policy", "system": "Match them.", "user": "  A B\nX 4 .\nY . 7"},
            {"player": "scripted:honest", "system": "Match them.", "user": "  A B\nX . 2"},
        ],
        "turns": [
            turn(0, "[message] X A 4"),
            turn(1, "[propose] X", "Error: one line a paper."),
            turn(1, "[propose]\nProposal:\nA: X"),
            turn(0, "[accept]"),
        ],
        "facts": {"best": 11.0, "solo_0": 0.7},
    }
    return json.loads(json.dumps(game))


def test_a_game_as_text() -> None:
    """The rules once, both views side by side, every turn with its seat, the outcome."""
    text = game_text(record(), width=80)
    assert text.count("Match them.") == 1 and max(map(len, text.splitlines())) <= 80
    in_order = ("g12", "Match them.", "X 4 .", "[message] X A 4", "[propose] X")
    in_order += ("Error: one line a paper.", "A: X", "[accept]", "0.970")
    places = [text.index(part) for part in in_order]
    assert places == sorted(places)
    (views,) = [line for line in text.splitlines() if "X 4 ." in line]
    assert views.split() == ["X", "4", ".", "│", "X", ".", "2"]
    speakers = [line.split()[:3] for line in text.splitlines() if "[" in line]
    assert [seat for _, seat, _ in speakers] == ["0", "1", "1", "0"]


def test_wide_views_stand_one_after_the_other() -> None:
    game = record()
    game["seats"][1]["user"] = "paper " * 10
    lines = game_text(game, width=60).splitlines()
    first, second = (next(i for i, line in enumerate(lines) if f"seat {s}" in line) for s in (0, 1))
    assert lines[first + 1 : second] == ["  A B", "X 4 .", "Y . 7", ""]
    assert max(map(len, lines)) <= 60


def test_different_rules_are_shown_with_each_seats_view() -> None:
    game = record()
    game["seats"][1]["system"] = "You advise."
    text = game_text(game, width=80)
    assert "── rules" not in text
    assert "Match them.                            │ You advise." in text


def test_a_game_without_agreement_says_why() -> None:
    game = record()
    game.update(agreed=False, ended="turns", score_norm=0.0, turns=[turn(0, "")], facts={})
    text = game_text(game)
    assert "no agreement" in text and "turns" in text.splitlines()[-1]


def rows(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * i, "score": v} for i, v in enumerate(values)]


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [[tuple(map(float, p.split(","))) for p in x.attrib["points"].split()] for x in lines]


def test_points_are_scaled_to_the_axes() -> None:
    """Steps 0, 10, 20 span the plot; scores 0, 0.5, 1 lie at its bottom, middle and top."""
    svg = learning_curve_svg({"a": rows(0.0, 0.5, 1.0)}, y="score", title="t")
    (points,) = points_of(svg)
    assert points == [(64.0, 292.0), (302.0, 166.0), (540.0, 40.0)]


def test_labels_legend_and_escapes() -> None:
    runs = {"talk <1>": rows(0.84, 0.96), "control": rows(0.8, 0.8)}
    svg = learning_curve_svg(runs, y="score", title="Talk & score")
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"Talk & score", "step", "score", "talk <1>", "control"} <= set(texts)
    assert {"0.8", "0.85", "0.95", "0", "10"} <= set(texts)
    assert root.attrib["aria-label"] == "Talk & score"


def test_runs_of_one_kind_share_a_colour_and_an_entry() -> None:
    runs = {name: rows(0.0, 1.0) for name in ("a, seed 0", "a, seed 1", "b, seed 0")}
    alike = {name: name[0] for name in runs}
    root = ElementTree.fromstring(learning_curve_svg(runs, y="score", title="t", alike=alike))
    colours = [line.get("stroke") for line in root.iter(f"{SVG}polyline")]
    assert colours[0] == colours[1] != colours[2]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [texts.count(entry) for entry in ("a", "b", "a, seed 0")] == [1, 1, 0]


def test_missing_and_non_finite_values_are_left_out() -> None:
    runs = {"a": [*rows(0.1, None, float("nan"), 0.4), {"step": 50}], "empty": rows(None)}
    svg = learning_curve_svg(runs, y="score", title="t")
    assert [len(points) for points in points_of(svg)] == [2]
    assert "empty" not in svg
    with pytest.raises(ValueError, match="needs rows with 'entropy'"):
        learning_curve_svg(runs, y="entropy", title="t")


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-6, 250000.0])
def test_one_flat_point_still_draws(value: float) -> None:
    (points,) = points_of(learning_curve_svg({"a": rows(value)}, y="score", title="t"))
    assert 40 <= points[0][1] <= 292
