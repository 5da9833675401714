"""Instances on disk: parquet for generated ones, the published jsonl for boards that people played.

One parquet row is one instance, tables as lists of rows. Errors name the file and the line or row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dialop.board import MatchingInstance, instance_from_dict
from dialop.recorded import instance_from_record

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
    """Write instances as one parquet file, making its folder if needed.

    Raises:
        ValueError: for another ending than .parquet.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_to_row(instance) for instance in instances]
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), path)


def read_instances(path: str | Path) -> list[MatchingInstance]:
    """Read a .parquet of instances, or a .jsonl of recorded games as the boards people played.

    Raises:
        ValueError: for another ending or content that is no instance; names the file and the row
            (from 0) or line (from 1).
        OSError: when the file cannot be read.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"instances are read from .parquet or .jsonl, got {path}")
    instances = []
    for index, record in enumerate(read_records(path)):
        try:
            instances.append(instance_from_record(record, key=f"{path.stem}/{index}"))
        except ValueError as error:
            raise ValueError(f"{path} line {index + 1}: {error}") from error
    return instances


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file, one a line.

    Raises:
        ValueError: names the file and the line (from 1) that is no JSON object.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} line {number}: no JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path} line {number}: no JSON object")
            yield record


def _read_parquet(path: Path) -> list[MatchingInstance]:
    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: no parquet file ({error})") from error
    instances = []
    for number, row in enumerate(rows):
        missing = [name for name in _SCHEMA.names if row.get(name) is None]
        if missing:
            raise ValueError(f"{path} row {number}: no {', '.join(missing)}")
        try:
            instances.append(_from_row(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} row {number}: {error}") from error
    return instances


def _to_row(instance: MatchingInstance) -> dict[str, Any]:
    row = {name: getattr(instance, name) for name in _PLAIN}
    for field, column in _PAIRS:
        row[f"{column}_0"], row[f"{column}_1"] = getattr(instance, field)
    return row


def _from_row(row: dict[str, Any]) -> MatchingInstance:
    data = {name: row[name] for name in _PLAIN}
    for field, column in _PAIRS:
        data[field] = (row[f"{column}_0"], row[f"{column}_1"])
    # Tables hold whole numbers, so their best is one too; the column is a float for the schema.
    data["best"] = int(data["best"]) if data["best"].is_integer() else data["best"]
    return instance_from_dict(data)
