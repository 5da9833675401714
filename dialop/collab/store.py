"""Reads and writes collaboration instances: one parquet row or one JSON line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dialop import rows
from dialop.collab.task import FIELDS, CollabInstance, instance_from_dict

_SCHEMA = pa.schema([(name, pa.string()) for name in FIELDS])


def write_instances(path: Path, instances: Sequence[CollabInstance]) -> None:
    """Write instances to one parquet file. Creates its folder if needed.

    Raises:
        ValueError: if the path does not end in .parquet.
    """
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([asdict(instance) for instance in instances], schema=_SCHEMA)
    pq.write_table(table, path, write_page_checksum=True)


def read_instances(path: Path) -> list[CollabInstance]:
    """Read the instances of a .parquet or .jsonl file.

    Raises:
        ValueError: for another file type, an invalid instance or a repeated key; names the file and
            the row or line.
        OSError: when the file cannot be opened.
    """
    return rows.read_instances(
        path,
        lambda _, row: instance_from_dict({k: v for k, v in row.items() if v is not None}),
    )
