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

from dialop import rows
from dialop.planning.board import PlanningInstance, instance_from_dict
from dialop.planning.recorded import instance_from_record
from dialop.planning.score import check_reference


def write_instances(path: str | Path, instances: Sequence[PlanningInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    lines = [{"key": i.key, "planning": json.dumps(asdict(i))} for i in instances]
    rows.write_rows(path, lines)


def read_instances(path: str | Path) -> list[PlanningInstance]:
    """Read the instances of a .parquet file, or the cities of a .jsonl file of recorded games.

    Raises ValueError and OSError as `rows.read_instances`.
    """
    return rows.read_instances(path, _from_row, instance_from_record)


def _from_row(row: dict[str, Any]) -> PlanningInstance:
    if not isinstance(row.get("planning"), str):
        raise ValueError(
            "the column `planning`, which holds this game's instances, is missing or not text"
        )
    instance = instance_from_dict(rows.parse_json(row["planning"]))
    check_reference(instance)
    return instance
