"""The commands of `python -m dialop`: output, exit status, one line for bad input."""

import re
import sys
from pathlib import Path

import pytest

from dialop.cli import main
from dialop.kit import load_kit
from selfplay.config import load_config
from selfplay.preflight.run import baseline_games, cut_off
from selfplay.preflight.seats import check_players
from tests.helpers.chat_families import rendering_of
from tests.helpers.dialop_boards import human_games


def test_generate_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "games.parquet"
    options = "--num 6 --size 3 --seed 7 --start 4 --no-scale --max-value 10 --p-observed 0.5"
    assert main(["generate", "--game", "matching", *options.split(), "--out", str(path)]) == 0
    instances = load_kit("matching").read(path)
    assert [instance.key for instance in instances] == [f"7/{i}" for i in range(4, 10)]
    assert all(i.size == 3 and i.scales == (1.0, 1.0) and i.max_value == 10 for i in instances)
    said = capsys.readouterr().err
    assert "6 instances in" in said and said.endswith(f" s: {path}\n")
    assert main(["generate", "--num", "1", "--size", "2", "--out", str(path)]) == 0
    assert capsys.readouterr().err.endswith(f" s: {path}, which replaces an older file\n")


def test_instances_that_are_not_written_leave_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    def full(table: object, where: Path, **more: object) -> None:
        where.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    path = tmp_path / "games.parquet"
    path.write_bytes(b"mine")
    monkeypatch.setattr(parquet, "write_table", full)
    assert main(["generate", "--num", "2", "--size", "3", "--out", str(path)]) == 2
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


# Options of `generate`, and one that is refused.
OPTIONS = {
    "collab": ("--max-value 10", "--max-value=1"),
    "matching": ("--size 2 --no-scale --keep all", "--size=9"),
    "mediation": ("--days 1 --keep-flights 2 --events 2", "--days=0"),
    "planning": ("--sites 5 --slots 2 --preferences 4 --no-distance", "--slots=4"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_games_own_options_are_flags(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (words, bad), path = OPTIONS[name], tmp_path / "games.parquet"
    make = ["generate", "--game", name, "--num", "3", "--out", str(path), *words.split()]
    assert main(make) == 0
    assert capsys.readouterr().err.startswith("3 instances in")
    assert len({instance.key for instance in load_kit(name).read(path)}) == 3
    assert main([*make, bad]) == 2
    option = bad[2:].partition("=")[0].replace("-", "_")
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {option} must be ")


def test_replay_reports_every_game(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(human_games("planning"))]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 57
    assert captured.err == "56 of 57 games agree\n"


def test_a_new_game_passes_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a_game_of_my_own.py"
    assert main(["new", str(file)]) == 0
    config = load_config(file.with_suffix(".yaml"))
    assert config.game.name == str(file) and config.out == f"runs/{file.stem}"
    check_players(config)
    assert not cut_off(config, baseline_games(config), rendering_of("qwen2.5"))
    capsys.readouterr()
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().err == f"{file}: 10 ok on 4 instances; --seed draws others\n"
    file.write_text(re.sub("def vary.*?numbers\\)\\)\n", "", file.read_text(), flags=re.DOTALL))
    load_kit.cache_clear()
    sys.modules.pop(file.stem)
    assert main(["check", str(file)]) == 0
    assert (
        capsys.readouterr().err
        == f"{file}: 9 ok, 1 not checked on 4 instances; --seed draws others\n"
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my-game.py", ".py file that Python can import, got .*my-game.py; nearest is my_game.py"),
        ("my_game.txt", "a .py file that Python can import"),
        ("random.py", "a unique module name, got .*random.py"),
        ("taken.py", "the file must not exist, got .*taken.py"),
        ("of_settings.py", "the file must not exist, got .*of_settings.yaml"),
        ("none/a_new_game.py", "the file must be in an existing folder, got .*none/a_new_game.py"),
    ],
)
def test_a_new_game_is_a_new_module(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.py").write_text("mine")
    (tmp_path / "of_settings.yaml").write_text("mine")
    assert main(["new", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line)
    assert (tmp_path / "taken.py").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("words", [["chek", "x.py"], ["check"], ["generate", "--size", "nine"]])
def test_a_wrong_word_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
