"""A person with a run of several policies: each other seat is its role's policy."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from selfplay.apps.play.__main__ import main
from selfplay.model.policy import load_model
from tests.helpers.casts import casts
from tests.helpers.interrupted import replaced

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


@pytest.mark.parametrize(
    ("run", "words", "loaded", "players", "warned"),
    [
        (
            *("a", "--seat 0 --partner checkpoint:{b}/final/clerk", "b/final/clerk"),
            ("you", "checkpoint:{b}/final/clerk", "checkpoint:{b}/final/clerk"),
            "--partner checkpoint:{b}/final/clerk: {b}/final/clerk plays seat 1 (caller), which it "
            "has not learned; its policy clerk learned seat 2 (clerk)",
        ),
        (
            *("a/final/caller", "--seat 2 --partner checkpoint:{b}", "b/final/caller"),
            *(("checkpoint:{b}", "checkpoint:{b}", "you"), ""),
        ),
        ("a", "--seat clerk", "a/final/caller", ("policy caller", "policy caller", "you"), ""),
        (
            *("a", "--seat 1", "a/final/caller a/final/clerk"),
            *(("policy caller", "you", "policy clerk"), ""),
        ),
        (
            *("a/final/clerk", "--seat 0", "a/final/clerk"),
            ("you", "the policy clerk of a", "the policy clerk of a"),
            "RUN: {a}/final/clerk plays seat 1 (caller), which it has not learned",
        ),
    ],
)
def test_only_weights_that_move_are_loaded_and_the_first_line_has_each_seat(
    run: str,
    words: str,
    loaded: str,
    players: tuple[str, ...],
    warned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {name: shutil.copytree(casts() / name, tmp_path / name) for name in ("a", "b")}
    monkeypatch.setattr("sys.stdin", io.StringIO("[message] 2\n\n"))
    found = []

    def noted(load: Any, path: str, **named: Any) -> Any:
        found.append(str(Path(path).relative_to(tmp_path)))
        return load(path, **named)

    given = words.format(**folders).split()
    with replaced(load_model, noted):
        assert main([str(tmp_path / run), "--terminal", *given, GREEDY]) == 0
    assert sorted(found) == loaded.split()
    shown = capsys.readouterr()
    roles = [f"seat 0 (caller): {players[0]}", f"seat 1 (caller): {players[1]}"]
    seats = "; ".join([*roles, f"seat 2 (clerk): {players[2]}"]).format(**folders)
    line, *_ = [line for line in shown.out.splitlines() if line.startswith("You play ")]
    assert line.endswith(f"; {seats}.")
    told = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    assert len(told) == bool(warned) and warned.format(**folders) in "".join(told)
