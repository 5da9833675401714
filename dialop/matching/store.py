"""Instances on disk: parquet for generated ones, the published jsonl for boards that people played.

One parquet row is one instance, tables as lists of rows. A file may hold anything: whatever is
wrong with it is one ValueError of one line that names the file and the line or row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dialop.matching.board import MatchingInstance, instance_from_dict
from dialop.matching.recorded import instance_from_record

# Far above any file of instances; what lies beyond would only fill the memory.
MAX_FILE_BYTES = 4 * 2**30
MAX_LINE_BYTES = 16 * 2**20
MAX_ROWS = 2_000_000
MAX_DEPTH = 64
_BATCH_ROWS = 256

_BOARD = pa.list_(pa.list_(pa.int32()))
_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("size", pa.int32()),
        ("table", _BOARD),
        ("mask_0", _BOARD),
        ("mask_1", _BOARD),
        ("scale_0", pa.float64()),
        ("scale_1", pa.float64()),
        ("first_seat", pa.int32()),
        ("best", pa.float64()),
        ("solo_0", pa.float64()),
        ("solo_1", pa.float64()),
        ("max_value", pa.int32()),
        ("reviewers", pa.list_(pa.string())),
        ("papers", pa.list_(pa.string())),
    ]
)
_PAIRS = (("masks", "mask"), ("scales", "scale"), ("solo", "solo"))
_PLAIN = ("key", "size", "table", "first_seat", "best", "max_value", "reviewers", "papers")


def write_instances(path: str | Path, instances: Sequence[MatchingInstance]) -> None:
    """Write instances as one parquet file, making its folder if needed.

    Raises:
        ValueError: for another ending than .parquet.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_to_row(instance) for instance in instances]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    pq.write_table(table, path, write_page_checksum=True)


def read_instances(path: str | Path) -> list[MatchingInstance]:
    """Read a .parquet of instances, or a .jsonl of recorded games as the boards people played.

    Raises:
        ValueError: for another ending or content that is no instance; names the file and the row
            (from 0) or line (from 1).
        OSError: when the file cannot be opened.
    """
    path = Path(path)
    recorded = path.suffix == ".jsonl"
    instances: list[MatchingInstance] = []
    places: dict[str, str] = {}
    for index, (place, row) in enumerate(read_rows(path)):
        try:
            if recorded:
                instance = instance_from_record(row, key=f"{path.stem}/{index}")
            else:
                instance = _from_row(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if instance.key in places:
            raise ValueError(
                f"{place}: key {instance.key!r} stands already in {places[instance.key]}"
            )
        places[instance.key] = place
        instances.append(instance)
    seen = (cell for i in instances for mask in i.masks for row in mask for cell in row)
    if instances and not any(seen):
        raise ValueError(f"{path}: on no board does a seat see a cell, so there is nothing to say")
    return instances


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .parquet or .jsonl file, each after its place for error messages.

    Raises:
        ValueError: for another ending, a file that is damaged or far too large, or a line that is
            no JSON object; names the file and, where there is one, the line.
        OSError: when the file cannot be opened.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".jsonl":
        return ((f"{path} line {i}", row) for i, row in enumerate(read_records(path), start=1))
    raise ValueError(f"instances are read from .parquet or .jsonl, got {path}")


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file, one a line.

    Raises:
        ValueError: names the file and the line (from 1) that is no JSON object, or too long.
        OSError: when the file cannot be opened.
    """
    with _opened(Path(path)) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path} line {number}"
            if number > MAX_ROWS or len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{place}: a file must have at most {MAX_ROWS:,} lines of at most "
                    f"{MAX_LINE_BYTES:,} bytes"
                )
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{place}: no JSON object, got {short(record)}")
            yield record


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text whose numbers are finite, whose texts are whole Unicode and whose
    lists and objects are at most `MAX_DEPTH` deep.

    Raises:
        ValueError: says what is wrong, in one line.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    layer, depth = [value], 0
    while layer := [item for item in layer if isinstance(item, dict | list | str)]:
        if depth > MAX_DEPTH:
            raise ValueError(f"no JSON that is read here (more than {MAX_DEPTH} levels deep)")
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, str):
                _check_unicode(item)
            elif isinstance(item, dict):
                inner += [*item, *item.values()]
            else:
                inner += item
        layer, depth = inner, depth + 1
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number must be finite, got {text[:40]}")
    return number


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a text must be whole Unicode, got half of a surrogate pair") from None


def _opened(path: Path) -> BinaryIO:
    """The file, open for reading, where it is no larger than `MAX_FILE_BYTES`."""
    num_bytes = path.stat().st_size
    if num_bytes > MAX_FILE_BYTES:
        raise ValueError(f"{path} must have at most {MAX_FILE_BYTES:,} bytes, got {num_bytes:,}")
    return path.open("rb")


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _opened(path) as opened:
        number = num_bytes = 0
        batches = _parquet_batches(opened)
        while True:
            try:
                rows, batch_bytes = next(batches)
            except StopIteration:
                return
            # What pyarrow and its conversions raise for a damaged file is any of these.
            except (
                pa.ArrowException,
                OSError,
                ValueError,
                TypeError,
                LookupError,
                ArithmeticError,
                MemoryError,
            ) as error:
                why = " ".join(str(error).split())[:200]
                raise ValueError(f"{path}: no parquet file that can be read ({why})") from None
            num_bytes += batch_bytes
            if number + len(rows) > MAX_ROWS or num_bytes > MAX_FILE_BYTES:
                raise ValueError(
                    f"{path} must have at most {MAX_ROWS:,} rows of {MAX_FILE_BYTES:,} bytes in all"
                )
            for row in rows:
                yield f"{path} row {number}", row
                number += 1


def _parquet_batches(opened: BinaryIO) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Rows as dicts and their bytes in memory, some hundred at a time, checksums compared."""
    with pq.ParquetFile(opened, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield batch.to_pylist(), batch.nbytes


def _to_row(instance: MatchingInstance) -> dict[str, Any]:
    row = {name: getattr(instance, name) for name in _PLAIN}
    for field, column in _PAIRS:
        row[f"{column}_0"], row[f"{column}_1"] = getattr(instance, field)
    return row


def _from_row(row: dict[str, Any]) -> MatchingInstance:
    missing = [name for name in _SCHEMA.names if row.get(name) is None]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    data = {name: row[name] for name in _PLAIN}
    for field, column in _PAIRS:
        data[field] = (row[f"{column}_0"], row[f"{column}_1"])
    # Tables hold whole numbers, so their best is one too; the column is a float for the schema.
    best = data["best"]
    data["best"] = int(best) if isinstance(best, float) and best.is_integer() else best
    return instance_from_dict(data)
