"""Converts plain values to JSON and back. Only plain values pass between an answer and its tests.

A value is plain if its exact type is in the tables below. A value of a derived type is sent as its
base type, and numpy and pandas values as their data. Loading builds only these types, whatever the
JSON holds, and looks up no names, so the reader need not trust the writer.
"""

from __future__ import annotations

import base64
import importlib
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PosixPath
from typing import Any, cast
from uuid import UUID

Json = Any
# Converts a value that is not plain.
Other = Callable[[Any], Json]

_MAX_INT = 2**63
# Name: exact type, function from a value to its parts, function from the parts to a value.
_KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, list, lambda *parts: tuple(parts)),
    "set": (set, list, lambda *parts: set(parts)),
    "frozenset": (frozenset, list, lambda *parts: frozenset(parts)),
    "dict": (dict, lambda v: [[k, w] for k, w in v.items()], lambda *parts: dict(parts)),
    "Counter": (Counter, lambda v: [dict(v)], Counter),
    "OrderedDict": (OrderedDict, lambda v: [list(v.items())], OrderedDict),
    "defaultdict": (defaultdict, lambda v: [dict(v)], lambda items: defaultdict(None, items)),
    "deque": (deque, lambda v: [list(v), v.maxlen], deque),
    "bytes": (bytes, lambda v: [v.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda v: [v.hex()], bytearray.fromhex),
    "int": (int, lambda v: [hex(v)], lambda text: int(text, 16)),
    "complex": (complex, lambda v: [v.real, v.imag], complex),
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], slice),
    "Decimal": (Decimal, lambda v: [str(v)], Decimal),
    "Fraction": (Fraction, lambda v: [v.numerator, v.denominator], Fraction),
    "date": (date, lambda v: [v.isoformat()], date.fromisoformat),
    "datetime": (datetime, lambda v: [v.isoformat()], datetime.fromisoformat),
    "time": (time, lambda v: [v.isoformat()], time.fromisoformat),
    "timedelta": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], timedelta),
    "timezone": (timezone, lambda v: [v.utcoffset(None)], timezone),
    "UUID": (UUID, lambda v: [str(v)], UUID),
    "Path": (PosixPath, lambda v: [str(v)], PosixPath),
    "keys": (type({}.keys()), list, lambda *parts: dict.fromkeys(parts).keys()),
    "values": (type({}.values()), list, lambda *parts: dict(enumerate(parts)).values()),
    "items": (type({}.items()), list, lambda *parts: dict(parts).items()),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}
_BASES: tuple[Callable[[Any], Any], ...] = (str, int, float, list, tuple, dict, set, frozenset)
_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,6}(\[\w{1,8}\])?")
_EXTENSION = re.compile(r"[\w\[\], :/+-]{1,60}")


def dump(value: Any, other: Other, *, derived_from: str = "") -> Json:
    """Convert a value to JSON. Values that are not plain are passed to `other`.

    A value whose class is defined in the module `derived_from` is never plain, whatever its base
    class is.
    """

    def go(value: Any) -> Json:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int and -_MAX_INT < value < _MAX_INT:
            return value
        if kind is list:
            return [go(part) for part in value]
        name = _NAMES.get(kind)
        if name is not None:
            return {name: [go(part) for part in _KINDS[name][1](value)]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": [kind.__name__, list(kind._fields), [go(part) for part in value]]}
        if isinstance(value, type | Enum) or kind.__module__ == derived_from:
            return other(value)
        package = kind.__module__.partition(".")[0]
        if package == "numpy":
            return _dump_numpy(value, go, other)
        if package == "pandas":
            return _dump_pandas(value, go, other)
        for base in _BASES:
            if isinstance(value, cast(type, base)):
                return go(base(value))
        return other(value)

    return go(value)


def load(data: Json, other: Callable[[str, Any], Any]) -> Any:
    """The value that `dump` converted. Values that are not plain come from `other(name, what)`.

    Raises:
        ValueError, TypeError, OverflowError, ArithmeticError: for JSON that `dump` does not write.
    """

    def go(data: Json) -> Any:
        if isinstance(data, list):
            return [go(part) for part in data]
        if not isinstance(data, dict):
            return data
        if len(data) != 1:
            raise ValueError("a value must have one name")
        ((name, parts),) = data.items()
        if name in _KINDS:
            return _KINDS[name][2](*[go(part) for part in parts])
        if name == "namedtuple":
            # Fields are attributes of the result, so they must be plain: no functions.
            title, fields, values = parts
            made = namedtuple(str(title), [str(field) for field in fields])  # type: ignore[misc]
            return made(*[load(value, _refused) for value in values])
        if name in _ARRAYS:
            return _ARRAYS[name](*[go(part) for part in parts])
        return other(name, parts)

    return go(data)


def _refused(name: str, what: Any) -> Any:
    raise ValueError(f"not a plain value: {name}")


def _dump_numpy(value: Any, go: Callable[[Any], Json], other: Other) -> Json:
    np = sys.modules["numpy"]
    if isinstance(value, np.generic) and _DTYPE.fullmatch(value.dtype.str):
        return {"scalar": [value.dtype.str, _packed(np.asarray(value))]}
    if not isinstance(value, np.ndarray):
        return other(value)
    whole = np.asarray(value)  # a subclass is sent as its data
    shape = [int(size) for size in whole.shape]
    if whole.dtype == object:
        return {"objects": [shape, [go(part) for part in whole.ravel()]]}
    if not _DTYPE.fullmatch(whole.dtype.str):
        return other(value)
    return {"array": [whole.dtype.str, shape, _packed(whole)]}


def _packed(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(dtype: str, shape: list[int], packed: str) -> Any:
    import numpy as np

    if not _DTYPE.fullmatch(dtype):
        raise ValueError("not a dtype of plain numbers")
    return np.frombuffer(bytearray(base64.b64decode(packed)), dtype).reshape(shape)


def _scalar(dtype: str, packed: str) -> Any:
    return _array(dtype, [1], packed)[0]


def _objects(shape: list[int], parts: list[Any]) -> Any:
    import numpy as np

    flat = np.empty(len(parts), dtype=object)
    flat[:] = parts
    return flat.reshape(shape)


def _dump_pandas(value: Any, go: Callable[[Any], Json], other: Other) -> Json:
    pd = sys.modules["pandas"]
    np = sys.modules["numpy"]
    if value is pd.NaT or value is pd.NA:
        return {"missing": [value is pd.NaT]}
    if isinstance(value, pd.Timestamp):
        return {"timestamp": [value.isoformat()]}
    if isinstance(value, pd.Timedelta):
        return {"duration": [value.value]}

    def column(values: Any) -> Json:
        data = values.array
        if isinstance(data.dtype, np.dtype):
            return go(np.asarray(values))
        return {"extension": [str(data.dtype), [go(part) for part in data]]}

    if isinstance(value, pd.RangeIndex):
        return {"steps": [value.start, value.stop, value.step, go(value.name)]}
    if isinstance(value, pd.MultiIndex):
        return {"levels": [[go(part) for part in value], go(list(value.names))]}
    if isinstance(value, pd.Index):
        return {"index": [column(value), go(value.name)]}
    if isinstance(value, pd.Series):
        return {"series": [column(value), go(value.index), go(value.name)]}
    if isinstance(value, pd.DataFrame):
        columns = [column(value.iloc[:, place]) for place in range(value.shape[1])]
        return {"frame": [columns, go(value.index), go(value.columns)]}
    return other(value)


def _pandas(name: str) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        pd: Any = importlib.import_module("pandas")

        match name:
            case "missing":
                return pd.NaT if parts[0] else pd.NA
            case "timestamp":
                return pd.Timestamp(parts[0])
            case "duration":
                return pd.Timedelta(parts[0], "ns")
            case "extension":
                if not _EXTENSION.fullmatch(parts[0]):
                    raise ValueError("not a pandas dtype")
                return pd.array(parts[1], dtype=parts[0])
            case "steps":
                return pd.RangeIndex(*parts[:3], name=parts[3])
            case "levels":
                return pd.MultiIndex.from_tuples(parts[0], names=parts[1])
            case "index":
                return pd.Index(parts[0], name=parts[1])
            case "series":
                return pd.Series(parts[0], index=parts[1], name=parts[2])
        columns, index, names = parts
        frame = pd.DataFrame(dict(enumerate(columns)), index=index)
        frame.columns = names
        return frame

    return make


_ARRAYS: dict[str, Callable[..., Any]] = {
    "array": _array,
    "scalar": _scalar,
    "objects": _objects,
    **{name: _pandas(name) for name in ("missing", "timestamp", "duration", "extension")},
    **{name: _pandas(name) for name in ("steps", "levels", "index", "series", "frame")},
}
