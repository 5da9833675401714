"""The three commands: output, exit status, and no traceback for any line."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dialop.cli import answer_lines, main
from dialop.kit import load_kit
from dialop.matching.game import MatchingGame
from dialop.matching.store import read_instances, write_instances
from tests.helpers.dialop_boards import BEST, FULL, SCALED, SMALL, human_games


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
    assert [line["error"] is None for line in got] == [True, True, False, True, False]
    assert got[3]["agreed"] and got[3]["over"] and got[3]["seat_to_move"] is None
    assert (got[3]["score"], got[3]["score_norm"]) == (12.0, 1.0)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", "the line is not JSON"),
        (b"[message] hi", "the line is not JSON"),
        (b"\xff\xfe", "the line is not JSON"),
        (b"[" * 100_000, "the line is not JSON"),
        (b"9" * 10_000, "the line is not JSON"),
        (b"null", "the line is not a JSON object"),
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


def test_generate_and_step_from_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "games.parquet"
    write_instances(path, [SMALL, SCALED])
    command = [sys.executable, "-m", "dialop", "step", "--instances", str(path), "--index", "1"]
    moves = b'{"seat": 1, "text": "[message] Hi"}\nrubbish\n'
    run = subprocess.run([*command, "--prompts"], input=moves, capture_output=True, check=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert (
        lines[0]["observations"] == ["Partner: [message] Hi", ""]
        and "not JSON" in lines[1]["error"]
    )
    assert b"Ava Li,,28" in run.stderr and b"Traceback" not in run.stderr
    assert main(["step", "--instances", str(path), "--index", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: --index must be 0 to 1, got 2")


def test_generate_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "games.parquet"
    options = "--num 6 --size 3 --seed 7 --start 4 --no-scale --max-value 10 --p-observed 0.5"
    assert main(["generate", "--game", "matching", *options.split(), "--out", str(path)]) == 0
    instances = read_instances(path)
    assert [instance.key for instance in instances] == [f"7/{i}" for i in range(4, 10)]
    assert all(i.size == 3 and i.scales == (1.0, 1.0) and i.max_value == 10 for i in instances)
    assert "6 instances in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "num", "agreeing"), [("matching", 67, 66), ("mediation", 81, 81), ("planning", 57, 56)]
)
def test_replay_reports_every_game(
    name: str, num: int, agreeing: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(human_games(name))]) == int(agreeing < num)
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == num
    assert captured.err == f"{agreeing} of {num} games agree\n"


# Options of `generate`, and one that is refused.
OPTIONS = {
    "collab": ("--max-value 10", "--max-value=1"),
    "matching": ("--size 2 --no-scale --keep all", "--size=9"),
    "mediation": ("--days 1 --keep-flights 2 --events 2", "--days=0"),
    "planning": ("--sites 5 --slots 2 --preferences 4 --no-distance", "--slots=4"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_instances_are_drawn_and_played(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moves are those of scripts in a game of this process."""
    (words, bad), path, kit = OPTIONS[name], tmp_path / "games.parquet", load_kit(name)
    make = ["generate", "--game", name, "--num", "3", "--seed", "4", "--out", str(path)]
    assert main([*make, *words.split()]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("3 instances in") and len(said) == 1 + (name != "collab")
    instances = kit.read(path)
    assert len({instance.key for instance in instances}) == 3
    game, lines, movers = kit.new_game(instances[1], kit.Options()), b"", []
    scripts = [kit.make_script(spec, seed=0) for spec in kit.seated(kit.BASELINES[0])]
    while (seat := game.seat_to_move) is not None:
        text = scripts[seat].act(game.view(seat))
        game.step(seat, text)
        lines += json.dumps({"seat": seat, "text": text}).encode() + b"\n"
        movers.append(game.seat_to_move)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    step = ["step", "--game", name, "--instances", str(path), "--index", "1", "--prompts"]
    assert main(step) == 0
    captured = capsys.readouterr()
    answers = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["seat_to_move"] for line in answers] == movers and len(movers) > 2
    assert answers[-1]["agreed"] and answers[-1]["score_norm"] == game.outcome().score_norm
    assert "--- seat 1" in captured.err
    assert main([*make, *words.split(), bad]) == 2
    option = bad[2:].partition("=")[0].replace("-", "_")
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {option} must be ")
