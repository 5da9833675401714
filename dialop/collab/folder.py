"""The working folder of one grading: limits on what an answer may write there, and its removal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# Limits on all files of one answer together: bytes, number of files, depth of folders.
MAX_BYTES = 64 * 2**20
MAX_FILES = 4096
_MAX_DEPTH = 64


def empty(folder: str) -> None:
    """Remove everything in `folder`, at any depth, in time linear in the number of entries.

    No other process may still write there. Afterwards `folder` is the current directory.
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
    """Whether the files under `folder` exceed a limit: in number, depth or total size."""
    num_files, num_bytes, left = 0, 0, [(folder, 0)]
    while left:
        path, depth = left.pop()
        if depth > _MAX_DEPTH:
            return True
        try:
            entries: Sequence[os.DirEntry[str]] = list(os.scandir(path))
        except OSError:  # removed in the meantime, or made unreadable
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
