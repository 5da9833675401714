"""Reads and writes the rows of a data file, parquet or JSON lines. Knows the files of no game.

Every defect of a file raises a ValueError that names the file and, where possible, the line or row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, TypeVar

from dialop.game import Instance

T = TypeVar("T", bound=Instance)

# Limits far above any real file of instances. They keep a broken file from filling the memory.
MAX_FILE_BYTES = 4 * 2**30
MAX_LINE_BYTES = 16 * 2**20
MAX_ROWS = 2_000_000
MAX_DEPTH = 64
_BATCH_ROWS = 256


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for each row of a .parquet or .jsonl file.

    `place` names the file and the row (from 0) or line (from 1), for error messages.

    Raises:
        ValueError: for another file type, a file that is damaged or too large, or a line that is
            not a JSON object. An error in a line names the line.
        OSError: when the file cannot be opened.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".jsonl":
        return ((place_of(path, i), row) for i, row in enumerate(read_records(path)))
    raise ValueError(f"instances are read from .parquet or .jsonl, got {path}")


def place_of(path: Path, index: int) -> str:
    """The file and the line (from 1) or row (from 0) of its row `index`."""
    return f"{path} line {index + 1}" if path.suffix == ".jsonl" else f"{path} row {index}"


def read_instances(
    path: str | Path,
    from_row: Callable[[dict[str, Any]], T],
    from_record: Callable[..., T] | None = None,
) -> list[T]:
    """The instances of a .parquet or .jsonl file.

    `from_row` parses a row. Where the game has recorded games, `from_record(row, key=)` parses the
    lines of a .jsonl file.

    Raises:
        ValueError: as `read_rows`, and for a row that is refused or a repeated key; names the
            file and the row (from 0) or line (from 1).
        OSError: when the file cannot be opened.
    """
    path = Path(path)
    recorded = from_record if path.suffix == ".jsonl" else None
    instances: list[T] = []
    places: dict[str, str] = {}
    for index, (place, row) in enumerate(read_rows(path)):
        try:
            instance = recorded(row, key=f"{path.stem}/{index}") if recorded else from_row(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if instance.key in places:
            raise ValueError(
                f"{place}: key {instance.key!r} is already used in {places[instance.key]}"
            )
        places[instance.key] = place
        instances.append(instance)
    return instances


def write_rows(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to one parquet file. Creates its folder if needed.

    Raises:
        ValueError: if the path does not end in .parquet.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"instances are written as .parquet, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path, write_page_checksum=True)


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a .jsonl file, one per line.

    Raises:
        ValueError: for a line that is not a JSON object or is too long; names the file and the line
            (from 1). Also for a file with more than `MAX_ROWS` lines or `MAX_FILE_BYTES` bytes.
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
                raise ValueError(f"{place}: not a JSON object, got {short(record)}")
            yield record


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Numbers must be finite, strings valid Unicode, and nesting at most `MAX_DEPTH` levels.

    Raises:
        ValueError: for any other text; the message is one line.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    layer, depth = [value], 0
    while layer := [item for item in layer if isinstance(item, dict | list | str)]:
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON must be at most {MAX_DEPTH} levels deep")
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
        raise ValueError("a string must be valid Unicode, got half of a surrogate pair") from None


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ValueError if it is larger than `MAX_FILE_BYTES`."""
    num_bytes = path.stat().st_size
    if num_bytes > MAX_FILE_BYTES:
        raise ValueError(f"{path} must have at most {MAX_FILE_BYTES:,} bytes, got {num_bytes:,}")
    return path.open("rb")


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException

    with _opened(path) as opened:
        number = num_bytes = 0
        batches = _parquet_batches(opened)
        while True:
            try:
                rows, batch_bytes = next(batches)
            except StopIteration:
                return
            # pyarrow and its conversions can raise any of these for a damaged file.
            except (
                ArrowException,
                OSError,
                ValueError,
                TypeError,
                LookupError,
                ArithmeticError,
                MemoryError,
            ) as error:
                why = " ".join(str(error).split())[:200]
                raise ValueError(f"{path}: not a readable parquet file ({why})") from None
            num_bytes += batch_bytes
            if number + len(rows) > MAX_ROWS or num_bytes > MAX_FILE_BYTES:
                raise ValueError(
                    f"{path} must have at most {MAX_ROWS:,} rows and {MAX_FILE_BYTES:,} bytes "
                    "of data"
                )
            for row in rows:
                yield place_of(path, number), row
                number += 1


def _parquet_batches(opened: BinaryIO) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield batches of rows as dicts, with their size in bytes. Page checksums are verified."""
    from pyarrow import parquet  # takes a while, and most runs read no file

    with parquet.ParquetFile(opened, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield batch.to_pylist(), batch.nbytes
