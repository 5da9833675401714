"""Reads and writes the rows of a data file, parquet or JSON lines, and reads folders of them.

Every defect of a file raises a ValueError that names the file and, if possible, the line or row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

from dialop.game import Instance
from dialop.shown import error_line
from dialop.specs import nearest

T = TypeVar("T", bound=Instance)

_BATCH_ROWS = 256
_SUFFIXES = (".parquet", ".jsonl")
# The most characters of a value, and of what a seat reads at once: more than any model reads. A
# tokenizer needs 170 bytes per character and ends the process when memory runs out.
MAX_TEXT = 16_000_000


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) for each row of a .parquet or .jsonl file, or of a folder: one that
    `datasets` saved (`save_to_disk`), or one split of such files, as a data set's folder of the hub
    has them. FOLDER/SPLIT names the split if there are several.

    `location` names the file and the row (from 0) or line (from 1), for error messages.

    Raises:
        ValueError: for another file type, a damaged file, a line that is not a JSON object, or more
            than MAX_TEXT characters; names the line.
        OSError: when the file cannot be opened.
    """
    if path.suffix in _SUFFIXES and not path.exists():
        near = nearest(str(path), map(str, path.parent.glob(f"*{path.suffix}")))
        raise FileNotFoundError(f"{path} does not exist{near}")
    if path.suffix == ".parquet":
        return bounded(_parquet_rows(path))
    if path.suffix == ".jsonl":
        records = enumerate(read_records(path))
        return bounded((location_of(path, i), row) for i, row in records)
    if (path / "state.json").is_file():
        return bounded(_saved_rows(path))
    return chain.from_iterable(map(read_rows, _split_files(path)))


def _split_files(path: Path) -> list[Path]:
    """The .parquet and .jsonl files of a folder, or those of a split as the last part of the path.
    Raises ValueError for a path without one, or with several splits."""
    saved = sorted(str(state.parent) for state in path.glob("*/state.json"))
    folder, named = (path, "") if path.is_dir() else (path.parent, path.name)
    below = () if path.is_file() else (*folder.glob("*"), *folder.glob("*/*"))
    files = sorted(each for each in below if each.suffix in _SUFFIXES)
    splits = {each: re.split(r"[-.]", each.name)[0] for each in files}
    found = [each for each in files if named in ("", splits[each])]
    names = saved or sorted({str(folder / splits[each]) for each in found})
    if saved or len(names) > 1:
        raise ValueError(f"must be one split, got all of {path}: one of {', '.join(names)}")
    if not found and not path.exists() and not path.suffix:
        near = nearest(str(path), (str(folder / split) for split in splits.values()))
        raise ValueError(f"{path} does not exist{near}")
    if not found:
        rule = "must be a .jsonl or .parquet file, or a folder of them or saved by `datasets`"
        raise ValueError(f"{rule}, got {path}")
    return found


def _saved_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a folder from `Dataset.save_to_disk`: Arrow streams, listed in a file."""
    from pyarrow import ipc  # slow to import, and most runs read no such folder

    number = 0
    try:
        listed = json.loads((folder / "state.json").read_bytes())["_data_files"]
        for name in (entry["filename"] for entry in listed):
            with (folder / name).open("rb") as file, ipc.open_stream(file) as stream:
                for batch in stream:
                    for row in batch.to_pylist():
                        yield location_of(folder, number), row
                        number += 1
    except Exception as error:  # noqa: BLE001 (a damaged file may raise anything)
        raise ValueError(f"{folder}: not a readable dataset ({error_line(error)})") from None


def bounded(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows. Raises ValueError for a value with more than MAX_TEXT characters; names the key."""
    for location, row in rows:
        for key, value in row.items():
            if (num := _num_characters(value)) > MAX_TEXT:
                raise ValueError(
                    f"{location}: {key} must have at most {MAX_TEXT} characters, got {num}"
                )
        yield location, row


def _num_characters(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_num_characters, value))
    return len(value) if isinstance(value, str) else 0


def location_of(path: Path, index: int) -> str:
    """The file, and the line (from 1) or row (from 0) of row `index`."""
    return f"{path} line {index + 1}" if path.suffix == ".jsonl" else f"{path} row {index}"


def read_instances(
    path: str | Path,
    from_row: Callable[[dict[str, Any]], T],
    from_record: Callable[..., T] | None = None,
) -> list[T]:
    """The instances of a .parquet or .jsonl file.

    `from_row` parses a row. If the game has recorded games, `from_record(row, key=)` parses the
    lines of a .jsonl file.

    Raises:
        ValueError: as `read_rows`, and for an invalid row or a repeated key; names the file and the
            row (from 0) or line (from 1).
        OSError: when the file cannot be opened.
    """
    path = Path(path)
    recorded = from_record if path.suffix == ".jsonl" else None
    instances: list[T] = []
    locations: dict[str, str] = {}
    for index, (location, row) in enumerate(read_rows(path)):
        try:
            instance = recorded(row, key=f"{path.stem}/{index}") if recorded else from_row(row)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        if instance.key in locations:
            raise ValueError(
                f"{location}: key {instance.key!r} is already used in {locations[instance.key]}"
            )
        locations[instance.key] = location
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

    new = path.with_name(f"{path.name}.new")  # keeps an older file until this one is complete
    try:
        parquet.write_table(pa.Table.from_pylist(rows), new, write_page_checksum=True)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a .jsonl file, one per line; blank lines may end the file.

    Raises:
        ValueError: for a line that is not a JSON object; names the file and the line (from 1).
        OSError: when the file cannot be opened.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() and not file.read().strip():
                return  # only blank lines follow
            try:
                record = parse_json(line)
                if not isinstance(record, dict):
                    raise ValueError(f"not a JSON object, got {short(record)}")
            except ValueError as error:
                why = str(error) if line.strip() else "blank"
                raise ValueError(f"{path} line {number}: {why}; a line is one object") from None
            yield record


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text whose numbers are finite, whose strings are valid Unicode, and whose
    objects have each key once.

    Raises:
        ValueError: for any other text; the message is one line.
    """
    try:
        value = json.loads(content, object_pairs_hook=_once)
        # Python reads NaN, 1e999 and half of a surrogate pair; writing them raises.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg}, character {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with these pairs. For a repeated key Python would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has key {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as opened:
        from pyarrow import parquet  # slow to import, and most runs read no file

        number = 0
        try:
            with parquet.ParquetFile(opened, page_checksum_verification=True) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        yield location_of(path, number), row
                        number += 1
        except Exception as error:  # noqa: BLE001 (a damaged file may raise anything)
            why = error_line(error)
            raise ValueError(f"{path}: not a readable parquet file ({why})") from None
