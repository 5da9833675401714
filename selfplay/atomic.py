"""Files and folders that are written completely or not at all.

A folder is filled under a hidden name and synced to disk; a manifest with the size and digest of
each file is written last, then the folder gets its name. So a folder with its final name was
complete when it was written, and `damage` finds any byte that was lost or changed later.
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
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # it imports torch, which a single process does not need here
    from selfplay.distributed import World

MANIFEST = "manifest.json"
T = TypeVar("T")
_Sealed = dict[str, tuple[int, str]]  # the size and digest of each file
_DIGEST = "sha1"  # against accidents only; takes two thirds of sha256's time
# Hidden names next to a folder: the one being filled or deleted, and the one being replaced.
PARTIAL, OLD = ".partial-", ".old-"
# The errors of a file system that refuses to write: full, over quota, file too large, broken,
# read-only, no permission, a folder in place of a file, a file in place of a folder.
REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
)


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
def atomic_folder(folder: Path, world: World | None = None) -> Iterator[Path]:
    """A hidden folder to fill, which replaces `folder` at the end.

    With `world` every rank must enter, and leaves once `folder` is complete; without it a single
    process writes. Raises as `filled` and `take_name` do.
    """
    with filled(folder, world) as partial:
        yield partial
    take_name(folder, world)


@contextmanager
def filled(folder: Path, world: World | None = None) -> Iterator[Path]:
    """An empty hidden folder, `hidden(folder)`, to fill; `take_name` then makes it `folder`.

    Raises OSError, on every rank of `world`, if the file system refuses to write (a full disk), and
    deletes the hidden folder.
    """
    partial = hidden(folder)

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    _once(begin, world)
    own: OSError | None = None
    try:
        yield partial
    except BaseException as error:
        own = _refusal(error, folder)
        if own is None:
            if world is None:
                shutil.rmtree(partial, ignore_errors=True)
            raise
    _agreed(own, partial, world)


def _agreed(own: T | OSError, partial: Path, world: World | None) -> list[T]:
    """Every rank's value. Raises any rank's OSError on all, after deleting the hidden folder."""
    every = [own]
    if world is not None:
        from selfplay.distributed import gather_objects

        every = gather_objects(own, world)
    if refused := next((one for one in every if isinstance(one, OSError)), None):
        _once(lambda: shutil.rmtree(partial, ignore_errors=True), world)
        raise refused
    return [one for one in every if not isinstance(one, OSError)]


def take_name(folder: Path, world: World | None = None) -> None:
    """Sync the filled folder to disk, write its manifest, and rename it to `folder`, which it
    replaces. What others have put there stays. Every rank of `world` must call and digests the
    files that it wrote; without it one process does everything. Raises OSError, on every rank, if
    the file system refuses to write: `folder` is then unchanged, and nothing is left next to it."""
    partial, old = hidden(folder), folder.with_name(OLD + folder.name)
    own: _Sealed | OSError
    try:
        own = _sealed(partial, world)
    except OSError as error:
        own = _refusal(error, folder) or error
    sealed = {name: both for one in _agreed(own, partial, world) for name, both in one.items()}

    def name_it() -> None:
        try:
            _write_manifest(partial, sealed)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            _sync(folder.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise _refusal(error, folder) or error from None
        _keep_others(old, folder)
        shutil.rmtree(old, ignore_errors=True)

    _once(name_it, world)


def _keep_others(old: Path, folder: Path) -> None:
    """Move what others have put into a folder, which its manifest does not name, to the one that
    replaces it. A folder without a manifest is not known to have any."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        names = [*json.loads((old / MANIFEST).read_bytes())["sizes"], "__pycache__"]
        own = {each.name for each in folder.iterdir()} | {name.split("/")[0] for name in names}
        for path in [each for each in old.iterdir() if each.name not in own]:
            path.rename(folder / path.name)


def hidden(folder: Path) -> Path:
    """Where a folder is filled before it gets its name."""
    return folder.with_name(PARTIAL + folder.name)


def stands(folder: Path) -> bool:
    """Whether a folder exists, or was moved away by a process that was killed before it put the
    replacement in place."""
    return folder.exists() or folder.with_name(OLD + folder.name).exists()


def discard(folder: Path) -> None:
    """Delete a folder if it exists. An interruption leaves only what `clear_leftovers` deletes."""
    if folder.exists():
        partial = hidden(folder)
        shutil.rmtree(partial, ignore_errors=True)
        folder.rename(partial)
        shutil.rmtree(partial)


def clear_leftovers(
    homes: Iterable[Path], folders: Iterable[str], files: Iterable[str] = ()
) -> None:
    """Delete a killed process's leftovers in these homes; restore a folder that it was replacing.

    Only of `folders`, names or patterns, and of `files`, names. No other process may write there.
    """
    for home, name in product(homes, folders):
        for unfilled in filter(Path.is_dir, home.glob(f"{PARTIAL}{name}")):
            shutil.rmtree(unfilled)
        for old in filter(Path.is_dir, home.glob(f"{OLD}{name}")):
            folder = old.with_name(old.name.removeprefix(OLD))
            if folder.exists():
                _keep_others(old, folder)
                shutil.rmtree(old)
            else:
                old.rename(folder)
    for unfinished in (home / f"{name}.new" for home, name in product(homes, files)):
        if unfinished.is_file():  # of `write_atomically`
            unfinished.unlink()


def damage(folder: Path, part: str = "") -> str | None:
    """Which file of a folder is missing or has changed since it was written, in words; else None.

    Files that are not in the manifest are ignored, and so are files whose names do not start with
    `part`. Manifests of older runs have only sizes.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        sizes, digests = dict(manifest["sizes"]), dict(manifest.get(_DIGEST, {}))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    names = [name for name in sizes if name.startswith(part)]
    for name in names:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != sizes[name]:
            return f"{name} has {file.stat().st_size} bytes instead of {sizes[name]}"
    names = [name for name in names if name in digests]
    try:
        found = _digests(folder, names)
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    changed = [name for name in names if found[name] != digests[name]]
    return f"{changed[0]} has other bytes than were written" if changed else None


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The digest of each file, computed in threads: 0.74 core seconds per GB with OpenSSL 3.0."""

    def digest(name: str) -> tuple[str, str]:
        with (folder / name).open("rb") as file:
            made = partial(hashlib.new, _DIGEST, usedforsecurity=False)
            return name, hashlib.file_digest(file, made).hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(digest, names))


def altered(folder: Path) -> str | None:
    """As `damage`; also reports a file that was not written with the others."""
    if (found := damage(folder)) is not None:
        return found
    named = {MANIFEST, *json.loads((folder / MANIFEST).read_bytes())["sizes"]}
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink())
    others = (str(path.relative_to(folder)) for path in files)
    return next((f"{name} is new there" for name in others if name not in named), None)


def _sealed(folder: Path, world: World | None) -> _Sealed:
    """Sync the files that this rank wrote to disk; returns the size and digest of each.

    In torch.distributed.checkpoint a rank's files start with `__RANK_`; rank 0 wrote the others.
    """
    paths = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST)
    names = [str(path.relative_to(folder)) for path in paths]
    if world is not None:
        ranks = {name: re.match(r"__(\d+)_", Path(name).name) for name in names}
        names = [name for name, r in ranks.items() if world.rank == (int(r[1]) if r else 0)]
    for file in (folder / name for name in names):
        with suppress(OSError):  # safetensors' files are private; some shares have no modes
            file.chmod(folder.stat().st_mode & 0o666)
        _sync(file)
    found = _digests(folder, names)
    return {name: ((folder / name).stat().st_size, digest) for name, digest in found.items()}


def _write_manifest(folder: Path, sealed: _Sealed) -> None:
    """Write the manifest of all ranks' files; sync it and all folder entries to disk."""
    sizes, digests = ({name: both[i] for name, both in sealed.items()} for i in (0, 1))
    text = json.dumps({"sizes": sizes, _DIGEST: digests}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    for path in [folder / MANIFEST, *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """Sync a file to disk, or the entries of a folder if the storage supports that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _refusal(error: BaseException | None, path: Path) -> OSError | None:
    """The error as an OSError about `path` if the file system refused to write, else None.

    safetensors and tokenizers have the errno in their message, torch.distributed.checkpoint has a
    mapping of ranks to (error, traceback).
    """
    while error is not None:
        text = re.search(r"os error (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(text[1]) if text else None)
        if number in REFUSALS:
            return OSError(number, os.strerror(number), str(path))
        for failed, _ in getattr(error, "failures", {}).values():
            if found := _refusal(failed, path):
                return found
        error = error.__cause__ or error.__context__
    return None


def _once(action: Callable[[], object], world: World | None) -> None:
    if world is None:
        action()
    else:
        from selfplay.distributed import on_first_rank

        on_first_rank(action, world)
