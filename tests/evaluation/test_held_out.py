"""The last line of a run: what self-play changed on the held-out games."""

import json
from pathlib import Path

from selfplay.evaluation.held_out import what_changed


def write(folder: Path, stage: str, scores: list[float], messages: float) -> None:
    mean = sum(scores) / len(scores)
    row = {"interval": [mean, mean, mean], "scores": scores, "measures": {"messages": messages}}
    (folder / f"held_out_{stage}.json").write_text(json.dumps({"sampled": row}))


def test_the_change_has_an_interval_over_the_same_games(tmp_path: Path) -> None:
    write(tmp_path, "before", [0.25, 0.75] * 200, 0.5)
    write(tmp_path, "after", [0.5, 1.0] * 200, 1.25)
    said = what_changed(tmp_path)
    # No game changed otherwise, so the ends lie within 1 - 0.025^(1/400) = 0.0092 of the range.
    assert "(+0.250 [+0.239, +0.257] on the same 400 games)" in said
    assert "messages a game from 0.50 to 1.25" in said and str(tmp_path / "final") in said


def test_lost_games_leave_a_change_without_an_interval(tmp_path: Path) -> None:
    write(tmp_path, "before", [0.0], 0.0)
    write(tmp_path, "after", [0.5, 0.5], 0.0)
    assert "(+0.500) and messages" in what_changed(tmp_path)
