"""Reads and writes collaboration instances: one parquet row or one JSON line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dialop import rows
from dialop.collab.grading import check_code
from dialop.collab.task import CollabInstance, instance_from_dict


def write_instances(path: Path, instances: Sequence[CollabInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    rows.write_rows(path, [asdict(instance) for instance in instances])


def read_instances(path: Path) -> list[CollabInstance]:
    """Read the instances of a .parquet or .jsonl file.

    Raises as `rows.read_instances`, and ValueError for a code task whose tests check nothing.
    """
    instances = rows.read_instances(
        path,
        lambda row: instance_from_dict({k: v for k, v in row.items() if v is not None}),
    )
    check_code((rows.place_of(path, i), instance) for i, instance in enumerate(instances))
    return instances
