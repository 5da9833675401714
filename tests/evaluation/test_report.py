"""Recorded games as text; the columns and the files of a report."""

import json
from pathlib import Path

import pytest

from selfplay.evaluation.report import MAX_NAME, Evaluated, short_names, write_report
from selfplay.evaluation.rows import Row
from selfplay.evaluation.tables import columns_of, measure_cells
from selfplay.metrics.records import game_text
from tests.helpers.run_folders import record


def test_a_game_as_text() -> None:
    """The rules once, each seat's view, every turn with its seat, the outcome."""
    text = game_text(record())
    assert text.count("Match them.") == 1 and max(map(len, text.splitlines())) <= 100
    in_order = ("g12", "Match them.", "X 4 .", "X . 2", "[message] X A 4", "[propose] X")
    in_order += ("Error: one line a paper.", "A: X", "[accept]", "0.970")
    places = [text.index(part) for part in in_order]
    assert places == sorted(places)
    speakers = [line.split()[:3] for line in text.splitlines() if "[" in line]
    assert [seat for _, seat, _ in speakers] == ["0", "1", "1", "0"]


def test_a_games_own_measure_has_a_column() -> None:
    columns = columns_of([{"score": 1.0, "days_named": 2.0, "errors_no_day": 1.0, "turns": 3.0}])
    assert [name for name, _, _ in columns] == ["turns", "days_named"]


def test_scores_by_seat_have_columns_where_the_policy_has_several_seats() -> None:
    """Rows with two partners share the columns; one seat's score is the score."""
    rows = [
        {"score": 0.5, f"score/scripted:{p}/0": 0.3, f"score/scripted:{p}/1": 0.7} for p in "ab"
    ]
    names = [name for name, *_ in columns_of(rows)]
    assert names == ["score/0", "score/1"]
    assert [measure_cells(row, names) for row in rows] == [["0.300", "0.700"]] * 2
    assert measure_cells({"score/self": 0.5}, names) == ["-", "-"]
    assert columns_of([{"score": 0.5, "score/scripted:a/1": 0.5, "score/self": 0.5}]) == []
    crossed = [{"score": 0.5, f"score/scripted:a/{seat}": 0.5} for seat in (0, 1)]
    assert columns_of(crossed) == [], "each row of a cross-play matrix has one seat"


def test_a_long_name_leaves_room_for_the_numbers_of_a_terminal() -> None:
    """Names keep their start and their end in 30 columns, and stay apart."""
    paths = [f"sampled with checkpoint:/a/long/path/to/runs/run_{name}/final" for name in "ab"]
    short = short_names(["sampled", *paths])
    assert short["sampled"] == "sampled"
    assert [short[path] for path in paths] == [f"sampled w…/to/runs/run_{n}/final" for n in "ab"]
    same = short_names([f"{'x' * 20}{n}{'y' * 30}" for n in range(12)])
    assert len({*same.values()}) == 12 and max(map(len, same.values())) <= MAX_NAME == 30


def test_a_report_of_another_step_keeps_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"policy": Row("policy", (0.5,), (0.5, 0.0, 1.0), {"score": 0.5})}
    for step, asked in ((4, "a"), (4, "a"), (5, "a"), (5, "b")):
        write_report(Evaluated("t", {"step": step, "asked": asked}, rows), tmp_path)
    names = ("evaluation_1", "evaluation_2", "evaluation")
    held = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert [(each["step"], each["asked"]) for each in held] == [(4, "a"), (5, "a"), (5, "b")]
    assert len([*tmp_path.iterdir()]) == 6 and capsys.readouterr().out.count("is now") == 2
