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

from dialop import rows
from dialop.mediation.recorded import instance_from_record
from dialop.mediation.records import (
    MAX_ARRIVAL_PREF,
    MAX_PRICE_PREF,
    MediationInstance,
    act_from_dict,
    user_from_dict,
)
from dialop.mediation.search import referenced
from dialop.values import checked_int, checked_list, checked_text, field, plain

_NUMBERS = ("arrival_pref", "best", "worst", "alone", "max_price_pref", "max_arrival_pref")


def write_instances(path: str | Path, instances: Sequence[MediationInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    lines = [plain(asdict(instance)) for instance in instances]
    for line in lines:
        del line["opening"]
    rows.write_rows(path, lines)


def read_instances(path: str | Path) -> list[MediationInstance]:
    """Read the instances of a .parquet file, or those of a .jsonl file of recorded human games.

    Raises ValueError and OSError as `rows.read_instances`.
    """
    return rows.read_instances(path, instance_from_dict, instance_from_record)


def instance_from_dict(data: Mapping[str, Any]) -> MediationInstance:
    """An instance from its plain JSON form, checked.

    Raises:
        ValueError: for an invalid instance, or if `best`, `worst` or `alone` do not match its
            flights; names the field, its rule and the value.
    """
    where = "the instance"
    key = checked_text(field(data, "key", where), "key")
    users = checked_list(field(data, "users", where), "users", low=2, high=2)
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
        opening=tuple(
            act_from_dict(act) for act in checked_list(data.get("opening") or (), "opening")
        ),
        **whole,
    )
    for act in instance.opening:
        for user, flight in zip(instance.users, act.flights or (), strict=False):
            checked_int(flight, "a proposal's flight", low=0, high=len(user.flights) - 1)
    right = referenced(instance)
    for name in ("best", "worst", "alone"):
        value = getattr(right, name)
        if whole[name] != value or isinstance(whole[name], bool):
            raise ValueError(
                f"{name} in {short(key)} must be {value}, that of its flights, got "
                f"{short(whole[name])}"
            )
    return instance
