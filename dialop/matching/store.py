"""Reads and writes instances: parquet files, and the published .jsonl files of human games.

A parquet row holds one instance, with tables as lists of rows. Any defect of a file raises a
ValueError with a one-line message that names the file and the line or row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dialop import rows
from dialop.matching.board import MatchingInstance, instance_from_dict
from dialop.matching.recorded import instance_from_record

_BOARD = pa.list_(pa.list_(pa.int32()))
_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("size", pa.int32()),
        ("table", _BOARD),
        ("mask_0", _BOARD),
        ("mask_1", _BOARD),
        ("scale_0", pa.float64()),
        ("scale_1", pa.float64()),
        ("first_seat", pa.int32()),
        ("best", pa.float64()),
        ("solo_0", pa.float64()),
        ("solo_1", pa.float64()),
        ("max_value", pa.int32()),
        ("reviewers", pa.list_(pa.string())),
        ("papers", pa.list_(pa.string())),
    ]
)
_PAIRS = (("masks", "mask"), ("scales", "scale"), ("solo", "solo"))
_PLAIN = ("key", "size", "table", "first_seat", "best", "max_value", "reviewers", "papers")


def write_instances(path: str | Path, instances: Sequence[MatchingInstance]) -> None:
    """Write instances to one parquet file. Creates its folder if needed.

    Raises:
        ValueError: if the path does not end in .parquet.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_to_row(instance) for instance in instances], schema=_SCHEMA)
    pq.write_table(table, path, write_page_checksum=True)


def read_instances(path: str | Path) -> list[MatchingInstance]:
    """Read the instances of a .parquet file, or the boards of a .jsonl file of recorded games.

    Raises:
        ValueError: for another file type, an invalid or repeated instance (names the row from 0 or
            the line from 1), or a file in which no seat sees any cell.
        OSError: when the file cannot be opened.
    """
    path = Path(path)

    def parse(index: int, row: dict[str, Any]) -> MatchingInstance:
        if path.suffix == ".jsonl":
            return instance_from_record(row, key=f"{path.stem}/{index}")
        return _from_row(row)

    instances = rows.read_instances(path, parse)
    visible = (cell for i in instances for mask in i.masks for line in mask for cell in line)
    if instances and not any(visible):
        raise ValueError(f"{path}: no seat sees a cell on any board, so messages are useless")
    return instances


def _to_row(instance: MatchingInstance) -> dict[str, Any]:
    row = {name: getattr(instance, name) for name in _PLAIN}
    for field, column in _PAIRS:
        row[f"{column}_0"], row[f"{column}_1"] = getattr(instance, field)
    return row


def _from_row(row: dict[str, Any]) -> MatchingInstance:
    missing = [name for name in _SCHEMA.names if row.get(name) is None]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    data = {name: row[name] for name in _PLAIN}
    for field, column in _PAIRS:
        data[field] = (row[f"{column}_0"], row[f"{column}_1"])
    # The column holds floats, but tables hold integers, so `best` is an integer too.
    best = data["best"]
    data["best"] = int(best) if isinstance(best, float) and best.is_integer() else best
    return instance_from_dict(data)
