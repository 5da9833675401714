"""Instances on disk: round trips, and errors that name the line or row of a damaged file."""

from pathlib import Path

import pytest

from dialop.kit import load_kit
from dialop.matching.kit import read as read_instances
from dialop.matching.kit import write as write_instances
from tests.helpers.dialop_boards import SMALL
from tests.helpers.hand_games import HAND_GAMES


@pytest.mark.parametrize("name", HAND_GAMES)
def test_instances_survive_a_file(name: str, tmp_path: Path) -> None:
    hand, kit = HAND_GAMES[name], load_kit(HAND_GAMES[name].kind.name)
    instances = [hand.instance, *kit.generate(kit.Options(), seed=4, start=0, num=3)]
    path = tmp_path / "new" / "games.parquet"
    kit.write(path, instances)
    assert kit.read(path) == instances
    kit.write(path, [])
    assert kit.read(path) == []
    with pytest.raises(ValueError, match=r"written as \.parquet, got games\.csv"):
        kit.write(Path("games.csv"), instances)
    with pytest.raises(ValueError, match=r"a \.jsonl or \.parquet file.*, got games\.csv"):
        kit.read(Path("games.csv"))
    with pytest.raises(OSError, match=r"absent\.parquet"):
        kit.read(tmp_path / "absent.parquet")


def test_the_best_value_stays_an_integer(tmp_path: Path) -> None:
    write_instances(tmp_path / "games.parquet", [SMALL])
    assert type(read_instances(tmp_path / "games.parquet")[0].best) is int
