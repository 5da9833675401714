"""The working folder of one grading: how much an answer may leave there, and its removal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# The most that all files of one answer hold, in bytes, in number, and in folders within folders.
MAX_BYTES = 64 * 2**20
MAX_FILES = 4096
_MAX_DEPTH = 64


def empty(folder: str) -> None:
    """Remove all that an answer has left, however deep, in time that grows with its number.

    Nobody else may write there any more. The working folder is `folder` afterwards.
    """
    os.chdir(folder)
    above: list[str] = []
    while True:
        inner = None
        for entry in os.scandir("."):
            if not entry.is_dir(follow_symlinks=False):
                Path(entry.name).unlink()
                continue
            try:
                Path(entry.name).rmdir()
            except OSError:
                inner = entry.name
        if inner is not None:
            Path(inner).chmod(0o700)
            os.chdir(inner)
            above.append(inner)
        elif above:
            os.chdir("..")
            Path(above.pop()).rmdir()
        else:
            return


def is_full(folder: str) -> bool:
    """Whether the files under `folder` are more, deeper, or larger together than an answer may
    leave."""
    num_files, num_bytes, left = 0, 0, [(folder, 0)]
    while left:
        path, depth = left.pop()
        if depth > _MAX_DEPTH:
            return True
        try:
            entries: Sequence[os.DirEntry[str]] = list(os.scandir(path))
        except OSError:  # removed since, or made unreadable
            continue
        for entry in entries:
            try:
                num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    left.append((entry.path, depth + 1))
            except OSError:
                continue
            num_files += 1
            if num_bytes > MAX_BYTES or num_files > MAX_FILES:
                return True
    return False
