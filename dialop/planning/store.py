"""Reads and writes instances: parquet files, and the published .jsonl files of human games.

A parquet row holds an instance as a key and a JSON text. Any defect of a file raises a ValueError
with a one-line message that names the file and the line or row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dialop import rows
from dialop.planning.board import PlanningInstance, instance_from_dict
from dialop.planning.recorded import instance_from_record
from dialop.planning.score import check_reference

_SCHEMA = pa.schema([("key", pa.string()), ("planning", pa.string())])


def write_instances(path: str | Path, instances: Sequence[PlanningInstance]) -> None:
    """Write instances to one parquet file. Creates its folder if needed.

    Raises:
        ValueError: if the path does not end in .parquet.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"key": i.key, "planning": json.dumps(asdict(i))} for i in instances]
    pq.write_table(pa.Table.from_pylist(lines, schema=_SCHEMA), path, write_page_checksum=True)


def read_instances(path: str | Path) -> list[PlanningInstance]:
    """Read the instances of a .parquet file, or the cities of a .jsonl file of recorded games.

    Raises:
        ValueError: for another file type, or an invalid or repeated instance; names the row (from
            0) or the line (from 1).
        OSError: when the file cannot be opened.
    """
    path = Path(path)

    def parse(index: int, row: dict[str, Any]) -> PlanningInstance:
        if path.suffix == ".jsonl":
            return instance_from_record(row, key=f"{path.stem}/{index}")
        if not isinstance(row.get("planning"), str):
            raise ValueError("no planning, the column of this game's instances")
        instance = instance_from_dict(rows.parse_json(row["planning"]))
        check_reference(instance)
        return instance

    return rows.read_instances(path, parse)
