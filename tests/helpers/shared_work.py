"""Work that many tests read and one does: a folder made once in a whole test run.

`conftest.py` makes the home of these folders and ends them; processes of pytest-xdist share it.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

HOME = "SELFPLAY_TESTS_SHARE"  # the environment variable that names the home


def once(key: object, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills: made by the test process that asks first, read by all others.

    `key` is everything the result depends on. Nobody may write to the folder afterwards.
    """
    name = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    folder = Path(os.environ[HOME]) / name
    done = folder.with_suffix(".done")
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a failed try has left
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def slow_except(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test: the cases, all of them slow but for these."""
    return [c if c in fast else pytest.param(c, marks=pytest.mark.slow) for c in cases]
