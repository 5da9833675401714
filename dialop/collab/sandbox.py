"""Runs a code answer against its tests, in two processes behind a wall.

The answer's process gets the code and the arguments of each call. The tests run in another process
and compare the results, which are plain values. docs/collab.md lists what the wall stops and what
it does not. Seconds end in `_s`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import IO

from dialop.collab.sandbox_child import NO_WALL, PASSED

LIMIT_S = 5.0
MEMORY_BYTES = 2**30
# Time for the processes of a grading to start, which is slow on a busy machine.
_START_S = 60.0
# The strongest wall first. "auto" never selects "none".
WALLS: tuple[str, ...] = ("namespaces", "landlock")
CHOICES: tuple[str, ...] = ("auto", *WALLS, "none")
_ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from dialop.collab.sandbox_child import main; sys.path.pop(0); main()"
)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}


class NoWall(ValueError):
    """No wall, or not the requested one, is available on this machine."""


def passes(
    code: str,
    *,
    tests: str,
    entry_point: str = "",
    limit_s: float = LIMIT_S,
    memory_bytes: int = MEMORY_BYTES,
    wall: str = "auto",
) -> bool:
    """Whether the tests pass on what the code defines.

    Tests are statements that raise (asserts), unittest cases, or a function `check` that takes the
    object named `entry_point`. A run without a verdict (out of time or memory, a crash, an exit)
    has failed. `limit_s` counts from the start of both processes.

    Raises:
        NoWall: if `wall`, one of `CHOICES`, is not available.
    """
    return _run(
        code,
        tests=f"{entry_point}\n{tests}",
        limit_s=limit_s,
        memory_bytes=memory_bytes,
        wall=available_wall(wall),
    )


@lru_cache(maxsize=len(CHOICES))
def available_wall(wall: str = "auto") -> str:
    """The wall to use for the setting `wall`. Tested once per process.

    Raises:
        NoWall: if none is available; says why and what to do.
    """
    if wall not in CHOICES:
        raise NoWall(f"game.options.code_wall must be one of {', '.join(CHOICES)}, got {wall!r}")
    if wall == "none":
        return wall
    failed = []
    for kind in WALLS if wall == "auto" else (wall,):
        try:
            works = _run(
                "x = 1", tests="\nassert x == 1", limit_s=60, memory_bytes=MEMORY_BYTES, wall=kind
            )
        except NoWall as error:
            failed.append(str(error))
            continue
        if works:
            return kind
        failed.append(f"{kind}: a trivial test failed behind it")
    raise NoWall(
        "game.options.code_wall: no wall is available to grade code "
        f"({'; '.join(failed)}). It needs Linux 5.13 with user namespaces or Landlock, and "
        "libseccomp (apt-get install libseccomp2); "
        "'none' grades without a wall"
    )


def _run(code: str, *, tests: str, limit_s: float, memory_bytes: int, wall: str) -> bool:
    """Grade behind a wall. Raises NoWall if the wall cannot be set up."""
    folder = tempfile.mkdtemp(prefix="answer-")
    try:
        with _open(code) as code_file, _open(tests) as tests_file:
            descriptors = code_file.fileno(), tests_file.fileno()
            words = [str(_ROOT), wall, folder, *map(str, descriptors)]
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", _START, *words, str(limit_s), str(memory_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"TMPDIR": folder, "HOME": folder, **_ENVIRONMENT},
                pass_fds=descriptors,
                start_new_session=True,
            )
        try:
            verdict, said = process.communicate(timeout=limit_s + _START_S)
        except subprocess.TimeoutExpired:
            raise NoWall(f"{wall}: no process within {_START_S} seconds") from None
        finally:
            _end(process)
    finally:
        _remove(folder)
    if process.returncode != 0:
        why = said.decode(errors="replace").strip().splitlines()[-1:]
        what = "" if process.returncode == NO_WALL else f"exit {process.returncode}, "
        raise NoWall(f"{wall}: {what}{why[0] if why else 'no reason given'}")
    return verdict == PASSED


def _open(text: str) -> IO[bytes]:
    """An unnamed file that holds a text, positioned at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - its reader closes it
    file.write(text.encode(errors="surrogatepass"))
    file.flush()
    file.seek(0)
    return file


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a grading that is still running, for example after an interrupt.

    Its processes cannot leave their process group.
    """
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _remove(folder: str) -> None:
    """Remove the folder of a grading. The first process has emptied it unless it was killed."""
    try:
        Path(folder).rmdir()
    except OSError:  # not empty, and maybe too deep for shutil.rmtree
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
