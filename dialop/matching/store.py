"""Reads and writes instances: parquet files, and the published .jsonl files of human games.

A parquet row holds one instance, with tables as lists of rows. Any defect of a file raises a
ValueError with a one-line message that names the file and the line or row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dialop import rows
from dialop.matching.board import MatchingInstance
from dialop.matching.recorded import instance_from_record
from dialop.values import check_fields, parsed

_PAIRS = (("masks", "mask"), ("scales", "scale"), ("solo", "solo"))
_PLAIN = ("key", "size", "table", "first_seat", "best", "max_value", "reviewers", "papers")
_NAMES = (*_PLAIN, *(f"{column}_{seat}" for _, column in _PAIRS for seat in (0, 1)))


def write_instances(path: str | Path, instances: Sequence[MatchingInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    rows.write_rows(path, [_to_row(instance) for instance in instances])


def read_instances(path: str | Path) -> list[MatchingInstance]:
    """Read the instances of a .parquet file, or the boards of a .jsonl file of recorded games.

    Raises ValueError and OSError as `rows.read_instances`, and ValueError for a file in which no
    seat sees any cell.
    """
    instances = rows.read_instances(path, _from_row, instance_from_record)
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
    check_fields(row, _NAMES)
    data = {name: row[name] for name in _PLAIN}
    for field, column in _PAIRS:
        data[field] = (row[f"{column}_0"], row[f"{column}_1"])
    # The column holds floats, but tables hold integers, so `best` is an integer too.
    best = data["best"]
    data["best"] = int(best) if isinstance(best, float) and best.is_integer() else best
    instance = parsed(MatchingInstance, data)
    instance.check()
    return instance
