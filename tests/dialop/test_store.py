"""Instances on disk: round trips, and errors that name the line or row of a damaged file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dialop.kit import load_kit
from dialop.matching.store import read_instances, write_instances
from dialop.rows import read_records
from tests.helpers.dialop_boards import SCALED, SMALL
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
    with pytest.raises(ValueError, match=r"read from \.parquet or \.jsonl, got games\.csv"):
        kit.read(Path("games.csv"))
    with pytest.raises(OSError, match=r"absent\.parquet"):
        kit.read(tmp_path / "absent.parquet")


def test_the_best_value_stays_an_integer(tmp_path: Path) -> None:
    write_instances(tmp_path / "games.parquet", [SMALL])
    assert type(read_instances(tmp_path / "games.parquet")[0].best) is int


def test_damaged_files_are_named_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "games.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"games\.parquet: "):
        read_instances(path)
    write_instances(path, [SMALL, SCALED])
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["solo_0", "best"]), path)
    with pytest.raises(ValueError, match=r"games\.parquet row 0: no best, solo_0"):
        read_instances(path)
    column = pa.array([2, 5], pa.int32())
    pq.write_table(table.set_column(table.schema.get_field_index("size"), "size", column), path)
    with pytest.raises(ValueError, match=r"games\.parquet row 1: table must be 5x5 in hand/1"):
        read_instances(path)


@pytest.mark.parametrize("second", ["not json", "[1]", "[" * 100_000])
def test_bad_lines_are_named(tmp_path: Path, second: str) -> None:
    path = tmp_path / "games.jsonl"
    path.write_text('{"a": 1}\n' + second)
    with pytest.raises(ValueError, match=r"games\.jsonl line 2: "):
        list(read_records(path))
