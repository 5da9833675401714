"""A run with branch points: it trains on them, and its played games are those of a plain run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_run import RUN_GAP, RUNS, finished, metrics_of

BRANCHES = RUNS["branches"]


@pytest.fixture(scope="module")
def branched() -> Path:
    return finished(*BRANCHES)


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Those of step 1."""
    lines = map(json.loads, (folder / name).read_text().splitlines())
    return [line for line in lines if line["step"] == 1]


def test_a_run_with_branches_trains_on_them(branched: Path) -> None:
    for line in metrics_of(branched):
        assert line["num_branch_points"] > 0 and 0 <= line["zero_variance_branches"] <= 1
        assert line["num_games"] == 16 < line["num_branch_games"]
        assert 0 < line["num_continuation_tokens"] < line["num_branch_tokens"]
        assert line["num_branch_tokens"] < line["num_generated_tokens"]
        assert line["num_trained_tokens"] > 0 and line["mismatch_max"] < RUN_GAP
    assert any("branches" in game for game in lines_of(branched, "games.jsonl"))


def test_the_played_games_are_those_of_a_plain_run(branched: Path) -> None:
    """The same weights play the first step, and branches change none of its random draws."""

    def told(games: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        kept = ("instance", "episode", "ended", "score_norm", "rewards", "facts")
        texts = ("seat", "text", "error", "observations", "num_tokens", "tokens")
        return [
            (*map(game.get, kept), [[*map(turn.get, texts)] for turn in game["turns"]])
            for game in games
        ]

    groups = lines_of(finished(), "groups.jsonl")
    plain = told([game for group in groups for game in group["games"]])
    assert told(lines_of(branched, "games.jsonl")) == plain and len(plain) == 16
