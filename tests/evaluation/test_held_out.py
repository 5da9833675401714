"""What a run says at its end: what self-play changed on the held-out games."""

import json
from pathlib import Path
from typing import Any

import pytest

from dialop import scaffold
from selfplay.config.own_code import game_digest
from selfplay.evaluation.held_out import forget_another_game, what_changed


def row(scores: list[float], messages: float = 0.0, **measures: float) -> dict[str, Any]:
    mean = sum(scores) / len(scores)
    interval = [mean, mean - 0.1, mean + 0.1]
    return {"interval": interval, "scores": scores, "measures": {"messages": messages, **measures}}


LOW, HIGH = [0.25, 0.75] * 200, [0.5, 1.0] * 200
OPPOSED = [{"reward/0": 0.5, "reward/1": 0.5}, {"reward/0": 0.6, "reward/1": 0.2}]
# The rows before and after self-play, and what is said of them.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # No game changed otherwise, so the ends lie within 1 - 0.025^(1/400) = 0.0092 of the range.
    "an interval over the same games": (
        {"sampled": row(LOW, 0.5)},
        {"sampled": row(HIGH, 1.25)},
        "(+0.250 [+0.239, +0.257] on the same 400 games) and messages a game from 0.50 to 1.25",
    ),
    "worse": ({"sampled": row(HIGH)}, {"sampled": row(LOW)}, "it made the policy worse"),
    "opposed seats are not worse": (
        {"sampled": row(HIGH, **OPPOSED[0])},
        {"sampled": row(LOW, **OPPOSED[1])},
        "the reward of seat 0 from 0.500 to 0.600, the reward of seat 1 from 0.500 to 0.200 and "
        "messages a game from 0.00 to 0.00; its seats are paid differently",
    ),
    "partners that do not change": (
        {"sampled": row([0.5]), "sampled with s:a": row([0.25])},
        {"sampled": row([0.5]), "sampled with s:a": row([0.75])},
        "with s:a from 0.250 [0.150, 0.350] to 0.750 [0.650, 0.850]",
    ),
    "lost games leave no interval": (
        {"sampled": row([0.0])},
        {"sampled": row([0.5, 0.5])},
        "(+0.500) and",
    ),
    "two versions of a game have no change": (
        {"sampled": row([0.0]) | {"game_code": "a1"}},
        {"sampled": row([1.0]) | {"game_code": "b2"}},
        "to 1.000 [0.900, 1.100] (not compared: the game's code changed in between, see ",
    ),
    "an older file does not name its code": (
        {"sampled": row(LOW)},
        {"sampled": row(HIGH) | {"game_code": "b2"}},
        "(+0.250 [+0.239, +0.257] on the same 400 games)",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_run_says_what_self_play_changed(case: str, tmp_path: Path) -> None:
    *stages, told = CHANGES[case]
    for stage, rows in zip(("before", "after"), stages, strict=True):
        (tmp_path / f"held_out_{stage}.json").write_text(json.dumps(rows))
    said = what_changed(tmp_path)
    assert told in said and ("policy worse" in said) == (case == "worse")


def test_games_of_other_code_are_played_again_before_a_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, path = tmp_path / "own_before.py", tmp_path / "held_out_before.json"
    own.write_text(Path(scaffold.__file__).read_text("utf-8"), "utf-8")
    for code, stays in ((game_digest(str(own)), True), ("", True), ("0" * 16, False)):
        path.write_text(json.dumps({"sampled": row([0.5]) | {"game_code": code}}))
        forget_another_game(tmp_path, str(own))
        assert path.exists() == stays
    assert capsys.readouterr().out.count("they are played again") == 1
    assert len(game_digest(str(own))) == 16 and not game_digest("matching")
