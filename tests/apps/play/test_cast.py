"""A person with a run of several policies: each other seat is its role's policy."""

import io
import json
import shutil
from pathlib import Path

import pytest

from selfplay.apps.play.__main__ import main
from tests.helpers.casts import casts

GREEDY = "rollout.temperature=0.01"


@pytest.mark.parametrize(("run", "answer"), [("a", "[answer] 0"), ("twins", "[answer] 4")])
def test_a_person_plays_with_the_policy_of_each_other_role(
    run: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The clerk of `a` answers 0, that of `twins` the sum of what the callers say."""
    folder = shutil.copytree(casts() / run, tmp_path / run)
    monkeypatch.setattr("sys.stdin", io.StringIO("[message] 2\n\n"))
    assert main([str(folder), "--terminal", "--seat", "0", GREEDY]) == 0
    assert f"with the policies of {run}" in capsys.readouterr().out
    (game,) = map(json.loads, (folder / "played.jsonl").read_text().splitlines())
    assert [seat["player"] for seat in game["seats"]] == ["person", "policy", "policy"]
    number = int(game["turns"][1]["text"].removeprefix("[message] "))
    said = game["turns"][-1]["text"]
    assert said == ("[answer] 0" if run == "a" else f"[answer] {2 + number}")


def test_one_policy_of_a_cast_plays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(casts() / "a", tmp_path / "a")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    out = ["--out", str(tmp_path / "watched.jsonl")]
    assert main([str(folder / "final/clerk"), "--watch", GREEDY, *out]) == 0
    (game,) = map(json.loads, (tmp_path / "watched.jsonl").read_text().splitlines())
    assert game["turns"][-1]["text"] == "[answer] 0"
