"""What a run says at its end: what self-play changed on the held-out games."""

import json
from pathlib import Path

from selfplay.evaluation.held_out import what_changed


def write(folder: Path, stage: str, scores: list[float], messages: float, **others: float) -> None:
    mean, measures = sum(scores) / len(scores), {"messages": messages, **others}
    row = {"interval": [mean, mean, mean], "scores": scores, "measures": measures}
    (folder / f"held_out_{stage}.json").write_text(json.dumps({"sampled": row}))


def test_the_change_has_an_interval_over_the_same_games(tmp_path: Path) -> None:
    write(tmp_path, "before", [0.25, 0.75] * 200, 0.5)
    write(tmp_path, "after", [0.5, 1.0] * 200, 1.25)
    said = what_changed(tmp_path)
    # No game changed otherwise, so the ends lie within 1 - 0.025^(1/400) = 0.0092 of the range.
    assert "(+0.250 [+0.239, +0.257] on the same 400 games)" in said
    assert said.endswith("messages a game from 0.50 to 1.25")


def test_a_policy_that_became_worse_is_told(tmp_path: Path) -> None:
    write(tmp_path, "before", [0.5, 1.0] * 200, 0.5)
    write(tmp_path, "after", [0.25, 0.75] * 200, 0.5)
    assert "0.50 to 0.50; it made the policy worse: try a fifth of optim.lr" in what_changed(
        tmp_path
    )


def test_a_pair_of_opposed_seats_is_not_called_worse(tmp_path: Path) -> None:
    write(tmp_path, "before", [0.5, 1.0] * 200, 0.5, **{"reward/0": 0.5, "reward/1": 0.5})
    write(tmp_path, "after", [0.25, 0.75] * 200, 0.5, **{"reward/0": 0.6, "reward/1": 0.2})
    said = what_changed(tmp_path)
    assert said.endswith(
        "; its seats are paid differently: eval.partners shows whether it got worse"
    )


def test_the_reward_of_each_seat_stands_beside_the_score(tmp_path: Path) -> None:
    """A negotiation whose score hides that one seat rises and the other falls."""
    write(tmp_path, "before", [0.6], 0.69, **{"reward/0": 0.585, "reward/1": 0.615})
    write(tmp_path, "after", [0.6], 0.04, **{"reward/0": 0.723, "reward/1": 0.477})
    said = what_changed(tmp_path)
    assert (
        ", the reward of seat 0 from 0.585 to 0.723, the reward of seat 1 from 0.615 to 0.477 and "
        "messages a game from 0.69 to 0.04"
    ) in said


def test_partners_that_do_not_change_stand_beside_the_score(tmp_path: Path) -> None:
    for stage, mean in (("before", 0.25), ("after", 0.75)):
        write(tmp_path, stage, [0.5], 0.0)
        path = tmp_path / f"held_out_{stage}.json"
        row = {"interval": [mean, mean - 0.1, mean + 0.1], "scores": [mean], "measures": {}}
        path.write_text(json.dumps({**json.loads(path.read_text()), "sampled with s:a": row}))
    said = what_changed(tmp_path)
    assert ", with s:a from 0.250 [0.150, 0.350] to 0.750 [0.650, 0.850] and messages" in said


def test_lost_games_leave_a_change_without_an_interval(tmp_path: Path) -> None:
    write(tmp_path, "before", [0.0], 0.0)
    write(tmp_path, "after", [0.5, 0.5], 0.0)
    assert "(+0.500) and messages" in what_changed(tmp_path)
