"""Spawned processes that do not import the program again.

A spawned process imports the program's main module before its own work. For train.py this imports
torch and transformers, which takes 6 s of CPU and 400 MB in each process that only makes instances.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Lock
from typing import Any

_NAMES = ("__spec__", "__file__")  # a spawned process finds the main module by these
_lock = Lock()
_hidden: list[dict[str, Any]] = []


@contextmanager
def without_main() -> Iterator[None]:
    """Processes spawned inside the block do not import the main module, so their arguments must
    come from other modules. Blocks of several threads may overlap."""
    main = vars(sys.modules["__main__"])
    with _lock:
        _hidden.append({name: main[name] for name in _NAMES if name in main})
        main.pop("__file__", None)
        main["__spec__"] = None
    try:
        yield
    finally:
        with _lock:
            if len(_hidden) == 1:
                main.update(_hidden[0])
                _hidden.clear()
            else:
                _hidden.pop()  # the first entry has the values; the others found them hidden


class Spawned(SpawnProcess):
    """A spawned process, `without_main`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with without_main():
            return SpawnProcess._Popen(process_obj)


class Spawn(SpawnContext):
    """multiprocessing's spawn context, `without_main`. Forking a process with running threads
    (torch, an engine) can hang."""

    Process = Spawned
