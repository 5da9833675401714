"""The process that runs one code answer: limits first, then a guard, then code and tests.

Started by `sandbox` with the job as JSON on standard input; imports nothing of ours. It writes a
file that the job names when all tests pass, and nothing otherwise.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import sys
import unittest
from pathlib import Path
from typing import Any

_REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "pty.",
    "signal.pthread_kill",
)
# Events whose first arguments are paths, and how many of them.
_WRITES = {
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.truncate": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
    "shutil.rmtree": 1,
}
_READS = ("os.listdir", "os.scandir", "os.chdir")
_MAX_FILE_BYTES = 16 * 2**20


def limit(job: dict[str, Any]) -> None:
    """CPU seconds, bytes of memory and of any file; no core dumps."""
    seconds = int(job["limit_s"]) + 1
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def guard(home: str) -> None:
    """Refuse, from now on and for good, what a test of a function never needs."""
    library = tuple({os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix)})
    real, decode, null = os.path.realpath, os.fsdecode, os.devnull
    busy = False

    def allowed(path: Any, *, writes: bool) -> bool:
        if not isinstance(path, str | bytes):
            return True  # an open descriptor
        whole = real(decode(path))
        inside = whole == home or whole.startswith(home + "/")
        return inside or whole == null or (not writes and whole.startswith(library))

    def watch(event: str, values: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy:  # what the guard itself looks up
            return
        if event.startswith(_REFUSED):
            raise PermissionError(f"refused: {event}")
        busy = True
        try:
            if event == "open":
                mode, flags = values[1], values[2]
                writes = bool(set(mode or "") & set("wax+")) or bool(
                    isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                )
                fine = allowed(values[0], writes=writes)
            elif event in _WRITES:
                fine = all(allowed(path, writes=True) for path in values[: _WRITES[event]])
            else:
                fine = event not in _READS or allowed(values[0], writes=False)
        finally:
            busy = False
        if not fine:
            raise PermissionError(f"refused: {event}")

    sys.addaudithook(watch)


def passed(code: str, tests: str, *, entry_point: str) -> bool:
    """Run both in one namespace; whether whatever the tests define passes."""
    space: dict[str, Any] = {"__name__": "answer"}
    exec(compile(code, "answer.py", "exec"), space)
    if entry_point and entry_point not in space:
        return False
    own = {name: space[name] for name in space if name != "__builtins__"}
    exec(compile(tests, "tests.py", "exec"), space)
    fresh = {name: value for name, value in space.items() if own.get(name) is not value}
    cases = [
        value
        for value in fresh.values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase)
    ]
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    if entry_point and callable(fresh.get("check")):
        fresh["check"](space[entry_point])
    return result.wasSuccessful()


def main() -> None:
    job = json.load(sys.stdin)
    home = os.path.realpath(Path.cwd())
    # Loaded while nothing is refused yet: tracebacks and test runners open their own source.
    for name in ("traceback", "linecache", "tempfile", "unittest.mock"):
        importlib.import_module(name)
    leave = os._exit
    limit(job)
    guard(home)
    verdict = job.pop("verdict")
    if passed(job["code"], job["tests"], entry_point=job["entry_point"]):
        (Path(home) / verdict).touch()
    leave(0)  # threads and exit handlers of the answer are not waited for


if __name__ == "__main__":
    main()
