"""A run with branch points: it trains on them, and its played games are those of a plain run."""

import json
from pathlib import Path

import pytest

from tests.helpers.tiny_run import RUN_GAP, RUNS, finished, metrics_of

BRANCHES = RUNS["branches"]


@pytest.fixture(scope="module")
def branched() -> Path:
    return finished(*BRANCHES)


def first_games(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "games.jsonl").read_text().splitlines()
    return [game for line in lines if (game := json.loads(line))["step"] == 1]


def test_a_run_with_branches_trains_on_them(branched: Path) -> None:
    for line in metrics_of(branched):
        assert line["num_branch_points"] > 0 and 0 <= line["zero_variance_branches"] <= 1
        assert line["num_games"] == 16 < line["num_branch_games"]
        assert 0 < line["num_continuation_tokens"] < line["num_branch_tokens"]
        assert line["num_branch_tokens"] < line["num_generated_tokens"]
        assert line["num_trained_tokens"] > 0 and line["mismatch_max"] < RUN_GAP
    assert any("branches" in game for game in first_games(branched))


def test_the_played_games_are_those_of_a_plain_run(branched: Path) -> None:
    """The same weights play the first step, and branches change none of its random draws."""
    games = [{k: v for k, v in g.items() if k != "branches"} for g in first_games(branched)]
    assert games == first_games(finished()) and len(games) == 16
