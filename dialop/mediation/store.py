"""Reads and writes mediation instances: parquet files, and .jsonl files of recorded human games.

A parquet row holds one instance. Any defect of a file raises a ValueError with a one-line message
that names the file and the line or row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as short
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dialop import rows
from dialop.mediation.recorded import instance_from_record
from dialop.mediation.records import (
    MAX_ARRIVAL_PREF,
    MAX_PRICE_PREF,
    MediationInstance,
    act_from_dict,
    checked_int,
    checked_items,
    checked_text,
    field,
    user_from_dict,
)
from dialop.mediation.search import with_references

_EVENT = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("importance", pa.int32()),
        ("shared", pa.bool_()),
    ]
)
_FLIGHT = pa.struct(
    [
        ("carrier", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("price", pa.int32()),
    ]
)
_USER = pa.struct(
    [
        ("events", pa.list_(_EVENT)),
        ("flights", pa.list_(_FLIGHT)),
        ("mean_price", pa.int32()),
        ("price_pref", pa.int32()),
    ]
)
_NUMBERS = ("arrival_pref", "best", "worst", "alone", "max_price_pref", "max_arrival_pref")
_SCHEMA = pa.schema(
    [("key", pa.string()), ("users", pa.list_(_USER)), *((name, pa.int32()) for name in _NUMBERS)]
)


def write_instances(path: str | Path, instances: Sequence[MediationInstance]) -> None:
    """Write instances to one parquet file. Creates its folder if needed.

    Raises:
        ValueError: if the path does not end in .parquet.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [plain(asdict(instance)) for instance in instances]
    for line in lines:
        del line["opening"]
    table = pa.Table.from_pylist(lines, schema=_SCHEMA)
    pq.write_table(table, path, write_page_checksum=True)


def read_instances(path: str | Path) -> list[MediationInstance]:
    """Read the instances of a .parquet file, or those of a .jsonl file of recorded games.

    Raises:
        ValueError: for another file type, or an invalid or repeated instance; names the row (from
            0) or the line (from 1).
        OSError: when the file cannot be opened.
    """
    path = Path(path)

    def parse(index: int, row: dict[str, Any]) -> MediationInstance:
        if path.suffix == ".jsonl":
            return instance_from_record(row, key=f"{path.stem}/{index}")
        return instance_from_dict(row)

    return rows.read_instances(path, parse)


def instance_from_dict(data: Mapping[str, Any]) -> MediationInstance:
    """An instance from its plain JSON form, checked.

    Raises:
        ValueError: for an invalid instance, also where `best`, `worst` or `alone` are not those of
            its flights; names the field, its rule and the value.
    """
    where = "the instance"
    key = checked_text(field(data, "key", where), "key")
    users = checked_items(field(data, "users", where), "users", low=2)
    if len(users) != 2:
        raise ValueError(f"users must be two, got {len(users)}")
    whole = {name: field(data, name, where) for name in _NUMBERS}
    for name, high in (
        ("arrival_pref", MAX_ARRIVAL_PREF),
        ("max_price_pref", MAX_PRICE_PREF),
        ("max_arrival_pref", MAX_ARRIVAL_PREF),
    ):
        checked_int(whole[name], name, low=0, high=high)
    instance = MediationInstance(
        key=key,
        users=(user_from_dict(users[0], "user 0"), user_from_dict(users[1], "user 1")),
        opening=tuple(act_from_dict(act) for act in data.get("opening") or ()),
        **whole,
    )
    right = with_references(instance)
    for name, value in zip(("best", "worst", "alone"), right, strict=True):
        if whole[name] != value or isinstance(whole[name], bool):
            raise ValueError(
                f"{name} in {short(key)} must be {value}, that of its flights, got "
                f"{short(whole[name])}"
            )
    return instance


def plain(value: Any) -> Any:
    """The value with all tuples replaced by lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
