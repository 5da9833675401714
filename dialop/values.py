"""Checks values that come from files, and converts tuples to JSON's lists and back.

Each check returns the value, or raises a ValueError of one line with the value's name, its rule and
the value found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from reprlib import repr as short
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

T = TypeVar("T")

MAX_TEXT = 300  # characters of a key, a name or a sentence


def field(data: Any, name: str, where: str = "it") -> Any:
    """A field of a JSON object. A field that is null counts as missing."""
    if not isinstance(data, Mapping) or data.get(name) is None:
        raise ValueError(f"{where} has no {name}")
    return data[name]


def check_fields(data: Mapping[str, Any], names: tuple[str, ...], what: str = "") -> None:
    """Raise ValueError if fields are missing or null; names all of them."""
    if missing := [name for name in names if data.get(name) is None]:
        raise ValueError(f"{what or 'no'} {', '.join(missing)}")


def checked_int(value: Any, name: str, *, low: int, high: int) -> int:
    """An integer from `low` to `high`; a bool is refused."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {short(value)}")
    return value


def checked_bool(value: Any, name: str) -> bool:
    """A truth value."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {short(value)}")
    return value


def checked_string(value: Any, name: str) -> str:
    """Any text, such as a message."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {short(value)}")
    return value


def checked_list(value: Any, name: str, *, low: int = 0, high: float = math.inf) -> tuple[Any, ...]:
    """The items of a list with `low` to `high` items."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list, got {short(value)}")
    if not low <= len(value) <= high:
        size = f"{low}" if low == high else f"{low} to {high}"
        raise ValueError(f"{name} must be a list of {size} items, got {len(value)}")
    return tuple(value)


def _printable(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > MAX_TEXT:
        raise ValueError(f"must be printable text on one line of at most {MAX_TEXT} characters")
    return text


Text = Annotated[str, AfterValidator(_printable)]


def parsed(kind: type[T], data: Any, where: str = "") -> T:
    """Plain JSON values parsed as this dataclass, whose annotations are the rules. `where` names
    the data in errors.

    Raises:
        ValueError: for a wrong type, a value out of bounds, a missing field.
    """
    try:
        return _reader(kind).validate_json(json.dumps(data), strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, ([where] if where else []) + list(first["loc"])))
        why = first["msg"].removeprefix("Value error, ")
        got = "" if isinstance(first["input"], dict) else f", got {short(first['input'])}"
        raise ValueError(f"{name}: {why}{got}" if name else f"{why}{got}") from None


@lru_cache(maxsize=32)
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def plain(value: Any) -> Any:
    """The value with all tuples as lists, as in JSON."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def frozen(value: Any) -> Any:
    """The value with all lists as tuples."""
    if isinstance(value, dict):
        return {name: frozen(item) for name, item in value.items()}
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value
