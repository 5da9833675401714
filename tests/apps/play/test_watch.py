"""Two policies that a person watches: who plays, what is shown, what is refused."""

import io
import json
import shutil
from pathlib import Path

import pytest

from selfplay.apps.play.__main__ import main
from tests.helpers.tiny_run import finished


def test_the_policy_plays_with_its_partner_in_each_seat_and_every_move_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The games are kept, and not among those that people played."""
    run = shutil.copytree(finished(), tmp_path / "run")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main([str(run), "--partner", "scripted:solo", "--watch"]) == 0
    shown = capsys.readouterr().out
    assert not (run / "played.jsonl").exists()
    games = [json.loads(line) for line in (run / "watched.jsonl").read_text().splitlines()]
    players = ["policy", "scripted:solo"]
    assert [game["players"] for game in games] == [players, players[::-1]]
    assert shown.count("The game is over: ") == 2
    for seat, name in enumerate(players):
        assert f"player {seat} ({name}): [" in shown or f"player {1 - seat} ({name}): [" in shown
