"""The three commands: output, exit status, and no traceback for any line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dialop_boards import BEST, FULL, SCALED, SMALL, human_games

from dialop.cli import answer_lines, main
from dialop.collab.store import read_instances as collab_tasks
from dialop.matching.game import MatchingGame
from dialop.matching.store import read_instances, write_instances


def answers(lines: bytes) -> list[dict[str, Any]]:
    out = io.StringIO()
    answer_lines(MatchingGame(SMALL, FULL), io.BytesIO(lines), out=out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_game_by_json_lines() -> None:
    moves = [(0, "[message] Hi"), (1, BEST), (1, "[accept]"), (0, "[accept]"), (0, "[accept]")]
    lines = [json.dumps({"seat": seat, "text": text}).encode() for seat, text in moves]
    got = answers(b"\n".join(lines))
    assert got[0] == {
        "seat_to_move": 1, "error": None, "over": False, "agreed": False, "score": 0.0,
        "score_norm": 0.0, "observations": ["", "Partner: [message] Hi"],
    }  # fmt: skip
    assert [line["error"] for line in got] == [
        None,
        None,
        "Error: it is your partner's turn",
        None,
        "Error: the game is over",
    ]
    assert got[3]["agreed"] and got[3]["over"] and got[3]["seat_to_move"] is None
    assert (got[3]["score"], got[3]["score_norm"]) == (12.0, 1.0)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", "the line is no JSON"),
        (b"[message] hi", "the line is no JSON"),
        (b"\xff\xfe", "the line is no JSON"),
        (b"[" * 100_000, "the line is no JSON"),
        (b"9" * 10_000, "the line is no JSON"),
        (b"null", "the line is no JSON object"),
        (b"{}", '"seat" must be 0 to 1, got null'),
        (b'{"seat": 2, "text": "x"}', '"seat" must be 0 to 1, got 2'),
        (b'{"seat": true, "text": "x"}', '"seat" must be 0 to 1, got true'),
        (b'{"seat": NaN, "text": "x"}', '"seat" must be 0 to 1, got NaN'),
        (b'{"seat": 0}', '"text" must be a string, got null'),
        (b'{"seat": 0, "text": ["x"]}', '"text" must be a string, got ["x"]'),
        (b'{"seat": 0, "text": "\\ud800"}', "line 1 has no tag"),
    ],
)
def test_bad_lines_are_answered_with_an_error(line: bytes, error: str) -> None:
    (got,) = answers(line + b"\n")
    assert got["error"].startswith(f"Error: {error}")
    assert got["seat_to_move"] == 0 and got["observations"] == ["", ""]


def test_generate_and_step_from_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "games.parquet"
    write_instances(path, [SMALL, SCALED])
    command = [sys.executable, "-m", "dialop", "step", "--instances", str(path), "--index", "1"]
    moves = b'{"seat": 1, "text": "[message] Hi"}\nrubbish\n'
    run = subprocess.run([*command, "--prompts"], input=moves, capture_output=True, check=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert (
        lines[0]["observations"] == ["Partner: [message] Hi", ""] and "no JSON" in lines[1]["error"]
    )
    assert b"Ava Li,,28" in run.stderr and b"Traceback" not in run.stderr
    out_of_range = subprocess.run([*command[:-1], "2"], input=b"", capture_output=True, check=False)
    assert out_of_range.returncode == 2
    assert out_of_range.stderr == b"error: --index must be 0 to 1, got 2\n"


def test_generate_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "games.parquet"
    options = "--num 6 --size 3 --seed 7 --start 4 --no-scale --max-value 10 --p-observed 0.5"
    assert main(["generate", "--game", "matching", *options.split(), "--out", str(path)]) == 0
    instances = read_instances(path)
    assert [instance.key for instance in instances] == [f"7/{i}" for i in range(4, 10)]
    assert all(i.size == 3 and i.scales == (1.0, 1.0) and i.max_value == 10 for i in instances)
    assert "6 instances in" in capsys.readouterr().err


def test_generate_refuses_bad_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--num", "1", "--size", "9", "--out", "x.parquet"]) == 2
    assert capsys.readouterr().err == "error: size must be 2 to 8, got 9\n"


def test_replay_reports_every_game(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(human_games())]) == 1
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert len(lines) == 67 and captured.err == "66 of 67 games agree\n"
    assert "does not fit the roster" in lines[16]["error"]


def test_replay_of_agreeing_games_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "three.jsonl"
    path.write_text("".join(human_games().read_text().splitlines(keepends=True)[:3]))
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_collaborations_are_drawn_and_played_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tasks.parquet"
    words = ["generate", "--game", "collab", "--num", "3", "--max-value", "10", "--out", str(path)]
    assert main(words) == 0
    task = collab_tasks(path)[1]
    moves = [(1, "What number?"), (0, "I won't say."), (1, f"[answer] {task.target}")]
    lines = "\n".join(json.dumps({"seat": seat, "text": text}) for seat, text in moves)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    step = ["step", "--game", "collab", "--instances", str(path), "--index", "1"]
    assert main(step) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["over"], last["score_norm"]) == (True, 1.0)
    assert main([*step, "--no-messages"]) == 2
    assert "--no-messages" in capsys.readouterr().err
    assert main([*words[:-3], "1", "--out", str(path)]) == 2
    assert "--max-value must be at least 2, got 1" in capsys.readouterr().err
