"""Reads and writes collaboration instances: one parquet row or one JSON line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dialop.collab.task import FIELDS, CollabInstance, instance_from_dict
from dialop.rows import read_rows

_SCHEMA = pa.schema([(name, pa.string()) for name in FIELDS])


def write_instances(path: Path, instances: Sequence[CollabInstance]) -> None:
    """Write instances to one parquet file. Creates its folder if needed.

    Raises:
        ValueError: if the path does not end in .parquet.
    """
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(instance) for instance in instances]
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), path, write_page_checksum=True)


def read_instances(path: Path) -> list[CollabInstance]:
    """Read the instances of a .parquet or .jsonl file.

    Raises:
        ValueError: for another file type, an invalid instance or a repeated key; names the file and
            the row or line.
        OSError: when the file cannot be opened.
    """
    instances: list[CollabInstance] = []
    places: dict[str, str] = {}
    for place, row in read_rows(path):
        try:
            instance = instance_from_dict({k: v for k, v in row.items() if v is not None})
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if instance.key in places:
            raise ValueError(
                f"{place}: key {instance.key!r} is already used in {places[instance.key]}"
            )
        places[instance.key] = place
        instances.append(instance)
    return instances
