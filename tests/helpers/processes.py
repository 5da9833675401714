"""Trainers run as processes of their own, to be read, killed and counted."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re
import resource
import socket
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from tests.helpers.shared_work import once

if TYPE_CHECKING:
    import psutil

HANG_S = 1200.0  # what only a process that hangs takes, however busy the machine is
WAIT_S = 120.0  # the same for what an idle machine does in seconds
TESTS = pathlib.Path(__file__).resolve().parents[1]
RANKS = TESTS / "helpers" / "ranks.py"


def fork(body: Callable[[], object]) -> subprocess.Popen[str]:
    """A process that runs `body` and exits with what it returns, or raises SystemExit with: a fork
    of this one, in which all is imported already."""

    def run() -> None:  # where Popen would start a program
        for pipe in range(3, 1024):  # Popen waits until one of them is closed
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                    os.close(pipe)
        gc.enable()
        status: object = 1
        try:
            sys.stdout = sys.stderr = os.fdopen(1, "w", 1)
            status = body()
        except SystemExit as left:
            status = left.code
        except BaseException:  # noqa: BLE001  whatever a program would end with
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status if isinstance(status, int) else status is not None)

    return subprocess.Popen(
        ["a fork"], preexec_fn=run, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def on_ranks(num: int, body: Callable[[], object]) -> subprocess.Popen[str]:
    """A process that runs `body` on that many ranks, all forks of this one."""
    from tests.helpers import ranks  # imports the trainer

    return fork(lambda: ranks.main(num, body))


def start(
    script: pathlib.Path,
    *arguments: str,
    torchrun: int = 0,
    forked: int = 0,
    path: tuple[pathlib.Path, ...] = (),
    output: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Run a script, able to import the project, `path` and the tests: once, as that many ranks of
    `torchrun`, or as ranks `forked` from one process: this one, but for a script with a path."""
    launcher: list[str] = []
    if torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    elif forked and not path:
        from tests.helpers import ranks

        return on_ranks(forked, lambda: ranks.run(str(script), *arguments))
    elif forked:
        launcher = [str(RANKS), str(forked)]
    command = [sys.executable, *launcher, str(script), *arguments]
    folders = [str(folder) for folder in (*path, TESTS.parent)]
    if "PYTHONPATH" in os.environ:
        folders.append(os.environ["PYTHONPATH"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=output, stderr=subprocess.STDOUT
    )


def measured_by(case: str, *arguments: str, ranks: int = 2) -> dict[str, Any]:
    """What the case MODULE:FUNCTION of `ranks.py` returned, which runs once in a test run."""

    def make(folder: pathlib.Path) -> None:
        started = start(pathlib.Path(case), *arguments, str(folder), forked=ranks)
        said, _ = started.communicate(timeout=HANG_S)
        assert started.returncode == 0, said[-4000:]

    folder = once((case, arguments, ranks), make)
    return json.loads((folder / "report.json").read_text())


def two_ranks(case: str, *, part: str = "fast") -> Any:
    """What a pair of ranks measured in this case: one pair measures all cases of the fast tests,
    another ("slow") all others."""
    return measured_by("two_ranks:measured", part)[case]


def say(case: str, **facts: object) -> None:
    """Tell the test, from inside such a process."""
    # In one write, the end of the line with it: several ranks write to one pipe.
    print(f"MARK {case} {json.dumps(facts)}\n", end="", flush=True)


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    """What the process printed up to the line with `mark`; fails with all of it if none comes."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            return "".join(lines)
    raise AssertionError(f"the process ended without {mark!r}:\n{''.join(lines)}")


def marks(output: str) -> dict[str, dict[str, Any]]:
    """What a script said with lines `MARK case {facts as JSON}`."""
    found = re.findall(r"^MARK ([a-z0-9 ]+) (\{.*\})$", output, re.MULTILINE)
    return {case: json.loads(facts) for case, facts in found}


def own_output(said: str) -> str:
    """What a process printed, less Python's warnings of installed packages' files: Python 3.12
    prints one where such a file is compiled and has an escape such as "\\d"."""
    warning = r"^.*/(?:site|dist)-packages/.*:\d+: \w+Warning: .*\n(?:  .*\n)?"
    return re.sub(warning, "", said, flags=re.MULTILINE)


def tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process and all it started."""
    import psutil

    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def left(processes: list[psutil.Process], *, limit_s: float = WAIT_S) -> list[psutil.Process]:
    """Those that still run after `limit_s`; [] as soon as none does. Zombies, which hold nothing
    but a number, do not run."""
    import psutil

    until_s = time.monotonic() + limit_s
    while processes and time.monotonic() < until_s:
        time.sleep(0.05)
        with suppress(psutil.NoSuchProcess):  # ended between the two questions; asked again
            processes = [
                p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
            ]
    return processes


@contextmanager
def free_port() -> Iterator[int]:
    """A port of this machine that no other program gets before the end of the block, unless it asks
    for it by number, as a server with SO_REUSEADDR may."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Inside, no file can grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
