"""Files and folders that are written completely or not at all, and folders that show damage when
they are read.

A folder is filled under a hidden name and synced to disk. A manifest with the size and SHA-256 of
each file is written last. Then the folder takes its name. Knows no models.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from selfplay.distributed import World, gather_objects, on_first_rank

MANIFEST = "manifest.json"
# Hidden names beside a folder: the one being filled or deleted, and the one being replaced.
PARTIAL, OLD = ".partial-", ".old-"
UNFINISHED = ".unfinished-"  # complete, but without what its writer adds last
# What a file system answers when it takes no more: full, over a quota, too large, broken, locked,
# a file that this user may not write, a folder in a file's place, a file in a folder's.
REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
)
_HASHERS = 8  # threads; hashlib lets them run at once


def write_atomically(path: Path, text: str) -> None:
    """Write the complete file or none of it: a crash or a full disk leaves the old file."""
    new = path.with_name(path.name + ".new")
    try:
        # UTF-8 cannot encode a lone surrogate; it is written as an escape.
        with new.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder_on_ranks(folder: Path, world: World) -> Iterator[Path]:
    """A hidden folder to fill, which replaces `folder` at the end. Every rank must enter, and
    leaves when `folder` is complete.

    Raises OSError, on every rank, if the file system refuses to take it: `folder` is then what it
    was before, and nothing is left beside it.
    """
    partial = folder.with_name(PARTIAL + folder.name)
    on_first_rank(lambda: _make_empty(partial), world)
    with _refusals(folder) as own:
        yield partial
    refusals = [each for part in gather_objects(own, world) for each in part]
    on_first_rank(lambda: _finish(partial, folder, refusals), world)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """The same for a process that writes alone. Any error leaves nothing beside `folder`."""
    partial = folder.with_name(PARTIAL + folder.name)
    _make_empty(partial)
    try:
        with _refusals(folder) as refusals:
            yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _finish(partial, folder, refusals)


@contextmanager
def _refusals(folder: Path) -> Iterator[list[OSError]]:
    """Keeps the file system's refusal of what is written inside in the list."""
    refusals: list[OSError] = []
    try:
        yield refusals
    except BaseException as error:
        found = refusal(error, folder)
        if found is None:
            raise
        refusals.append(found)


def discard(folder: Path) -> None:
    """Delete a folder, if it is there. Stopped in between, it leaves only what `clear_leftovers`
    deletes."""
    if not folder.exists():
        return
    partial = folder.with_name(PARTIAL + folder.name)
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)


def clear_leftovers(places: Iterable[Path]) -> None:
    """Delete what a killed process left in these folders; put back a folder that it was replacing.

    No other process may write there.
    """
    for place in places:
        for partial in (*place.glob(f"{PARTIAL}*"), *place.glob(f"{UNFINISHED}*")):
            shutil.rmtree(partial)
        for old in place.glob(f"{OLD}*"):
            folder = old.with_name(old.name.removeprefix(OLD))
            if folder.exists():
                shutil.rmtree(old)
            else:
                old.rename(folder)
        for unfinished in place.glob("*.new"):  # of `write_atomically`
            unfinished.unlink()


def damage(folder: Path) -> str | None:
    """How a folder differs from what was written, in words; None if it is whole.

    Reads every file. Files that the manifest does not name are ignored.
    """
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        recorded = {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
        if not recorded:
            return f"{MANIFEST} names no file"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, (size, _) in recorded.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        found = (folder / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    try:
        digests = _in_threads(_digest, [folder / name for name in recorded])
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    for (name, (_, wanted)), digest in zip(recorded.items(), digests, strict=True):
        if digest != wanted:
            return f"{name} has other bytes than were written (SHA-256)"
    return None


def refusal(error: BaseException, path: Path) -> OSError | None:
    """The error as an OSError about `path` if the file system refused to take more, else None.

    safetensors and tokenizers give the system's number in their text, torch.distributed.checkpoint
    a mapping of ranks to errors.
    """
    for each in _causes(error):
        number = each.errno if isinstance(each, OSError) else None
        told = re.search(r"os error (\d+)", str(each))
        if number is None and told:
            number = int(told[1])
        if number in REFUSALS:
            return OSError(number, os.strerror(number), str(path))
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        for failed, _ in getattr(error, "failures", {}).values():
            yield from _causes(failed)
        error = error.__cause__ or error.__context__


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _finish(partial: Path, folder: Path, refusals: list[OSError]) -> None:
    """Give the filled folder its manifest and its name, or delete it."""
    old = folder.with_name(OLD + folder.name)
    try:
        if refusals:
            raise refusals[0]
        _seal(partial)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise refusal(error, folder) or error from None
    shutil.rmtree(old, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Write the manifest, and have the disk hold every file and name of the folder."""
    manifest = folder / MANIFEST
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    digests = _in_threads(_synced_digest, files)
    recorded = {
        str(path.relative_to(folder)): [path.stat().st_size, digest]
        for path, digest in zip(files, digests, strict=True)
    }
    with manifest.open("w", encoding="utf-8") as file:
        json.dump({"files": recorded}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for place in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        _sync(place)


def _in_threads(read: Callable[[Path], str], paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(_HASHERS) as pool:
        return list(pool.map(read, paths))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Have the disk hold the names in a folder, where the storage can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
