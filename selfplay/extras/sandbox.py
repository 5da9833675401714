"""Grades code answers inside bubblewrap (`bwrap`); docs/code_grading.md describes it.

Two processes grade an answer, each in its own sandbox. One holds the tests and the only pipe to
which a verdict can be written. The other runs the answer, which sees the arguments of each call and
nothing else. Both run sandbox_child.py. Nothing is executed outside a sandbox.
Names of times in seconds end in `_s`.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from dialop.game import MachineError

LIMIT_S = 5.0
_START_S = 60.0  # for the sandboxes to start, which is slow on a busy machine
_WAITS_S = (1.0, 5.0)  # before retrying a grading whose sandbox did not start
_MAX_OUTPUT_BYTES = 2**20
_READY = b"ready\n"
_NEED = "code answers are graded inside bubblewrap, which"
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n`]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
_CHILD = Path(__file__).with_name("sandbox_child.py")
# /tmp holds 64 MiB and is the only place to write.
_OPTIONS = """
--unshare-all --unshare-user --uid 65534 --gid 65534 --cap-drop ALL
--die-with-parent --as-pid-1 --new-session --clearenv --setenv LC_ALL C.UTF-8
--setenv OMP_NUM_THREADS 1 --setenv OPENBLAS_NUM_THREADS 1
--size 67108864 --tmpfs /tmp --chdir /tmp
--dev-bind /dev/null /dev/null --dev-bind /dev/zero /dev/zero --dev-bind /dev/urandom /dev/urandom
--ro-bind /usr /usr --ro-bind /lib /lib --ro-bind-try /lib64 /lib64
--ro-bind-try /etc/ld.so.cache /etc/ld.so.cache --ro-bind-try /etc/alternatives /etc/alternatives
"""
# Per process. Pending signals include timers. The kernel does not limit the number of threads of
# the user root.
_LIMITS = "/usr/bin/prlimit --as=1073741824 --nproc=64 --nofile=64 --fsize=16777216 --core=0"
_LIMITS += " --sigpending=64"
# System calls that are refused: (fork, vfork,) unshare, setns; shmget, msgget, semget, mq_open,
# memfd_create, memfd_secret, io_uring_setup, io_setup, setsockopt, setxattr, lsetxattr, fsetxattr,
# setxattrat, (inotify_init,) inotify_init1, fanotify_init, whose memory escapes all limits;
# add_key, request_key, keyctl; bpf, perf_event_open, userfaultfd.
_REFUSED = {
    "x86_64": "57 58 272 308 29 68 64 240 319 447 425 206 54 188 189 190 463 253 294 300 "
    "248 249 250 321 298 323",
    "aarch64": "97 268 194 186 190 180 279 447 425 0 208 5 6 7 463 26 262 217 218 219 280 241 282",
}
# The number of each machine in a seccomp filter, and its system call clone.
_CALLS = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}
_CLONE3, _CLONE_THREAD, _FIRST_X32 = 435, 0x10000, 0x40000000


class NoSandbox(MachineError):
    """bubblewrap is missing, or does not work on this machine."""


def grade(answer: str, *, tests: str, entry_point: str) -> float:
    """1.0 if the tests pass on the Python in an answer, else 0.0. Raises NoSandbox as `passes`."""
    return float(passes(code_of(answer), tests=tests, entry_point=entry_point))


def code_of(answer: str) -> str:
    """The Python in an answer: its fenced blocks joined, without those in other languages; the
    whole answer if it has none."""
    blocks = [code for tag, code in _FENCE.findall(answer) if tag.lower() in _PYTHON]
    return "\n".join(blocks) if blocks else answer


def passes(code: str, *, tests: str, entry_point: str = "", limit_s: float = LIMIT_S) -> bool:
    """Whether the code passes the tests.

    Tests are statements that raise (asserts), unittest cases, or a function `check` that takes the
    object named `entry_point`. A run without a verdict (tests that do not parse, out of time or
    memory, a crash, an exit) fails. `limit_s` counts from the start of both processes.

    Raises:
        NoSandbox: if no sandbox starts in three tries, which is independent of code and tests.
    """
    for wait_s in _WAITS_S:
        with suppress(NoSandbox):
            return _run(code, [(tests, entry_point)], limit_s=limit_s) == ["passed"]
        time.sleep(wait_s)
    return _run(code, [(tests, entry_point)], limit_s=limit_s) == ["passed"]


def check_tests(rows: Sequence[tuple[str, str, str]], *, limit_s: float = LIMIT_S) -> None:
    """Check the (place, tests, entry point) of code tasks, many in one sandbox.

    Raises:
        ValueError: for the first row whose tests do not parse, or pass with an answer that raises
            at every call: such tests check nothing.
        NoSandbox: if no sandbox starts on this machine.
    """
    first = 0
    while first < len(rows):
        verdicts = _run(None, [row[1:] for row in rows[first:]], limit_s=limit_s)
        for (place, *row), verdict in zip(rows[first:], verdicts, strict=False):
            # Tests of earlier rows ran in the same process, so a pass is repeated separately.
            if verdict == "passed" and _run(None, [row], limit_s=limit_s) == ["passed"]:
                verdict = "its tests pass an answer that raises at every call"
            if verdict not in ("passed", "failed"):
                raise ValueError(f"{place}: {verdict}")
        # A row that ends the process or takes the whole limit has not passed.
        first += len(verdicts) or 1


def _run(code: str | None, rows: Sequence[Sequence[str]], *, limit_s: float) -> list[str]:
    """The verdicts on the code for each row (tests, entry point), until the process ends or its
    time is over. Then all processes are killed. Without code, every call of the answer raises."""
    try:
        return _run_once(code, rows, limit_s)
    except OSError as error:  # too many processes or files, no memory
        raise NoSandbox(f"{_NEED} did not start: {error}") from None


def _run_once(code: str | None, rows: Sequence[Sequence[str]], limit_s: float) -> list[str]:
    """As `_run`, but raises OSError if the machine has no process, file or memory left."""
    with ExitStack() as stack:
        answer_end, grader_end = map(stack.enter_context, socket.socketpair())
        job = stack.enter_context(_file(json.dumps({"code": code, "rows": rows}).encode()))
        errors = stack.enter_context(_file(b""))  # until a sandbox has started

        def start(end: socket.socket, *more: int) -> subprocess.Popen[bytes]:
            with _file(_seccomp()) as seccomp:
                process = subprocess.Popen(
                    _command(seccomp.fileno(), limit_s, *more),
                    stdin=end.fileno(),
                    stdout=subprocess.PIPE if more else subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=(seccomp.fileno(), *more),
                )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        if code is not None:
            start(answer_end)
        grader = start(grader_end, job.fileno())
        answer_end.close()
        grader_end.close()
        assert grader.stdout is not None
        written = _read(grader.stdout.fileno(), limit_s)
        if not written.startswith(_READY):
            errors.seek(0)
            why = " ".join(errors.read(300).decode(errors="replace").split()) or "it does not start"
            raise NoSandbox(
                f"{_NEED} does not work here ({why}): it needs the package bubblewrap, 0.8 or "
                "newer, and user namespaces"
            )
        return written.decode().split("\n")[1:-1]


def _read(descriptor: int, limit_s: float) -> bytes:
    """The output of a process up to its end, a time limit (from the first byte) or a size limit."""
    written, end = b"", time.monotonic() + _START_S
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(written) < _MAX_OUTPUT_BYTES and poll.poll(max(0, end - time.monotonic()) * 1000):
        part = os.read(descriptor, 4096)
        if not part:
            break
        if not written:
            end = time.monotonic() + limit_s
        written += part
    return written


def _command(seccomp: int, limit_s: float, *words: int) -> list[str]:
    """The command that runs sandbox_child.py with these arguments. Raises NoSandbox."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise NoSandbox(f"{_NEED} is not installed: apt-get install bubblewrap")
    options = [*_OPTIONS.split(), "--seccomp", str(seccomp)]
    prefixes = (sys.prefix, sys.base_prefix)
    for path in dict.fromkeys((*prefixes, *map(os.path.realpath, prefixes))):
        options += ["--ro-bind", path, path]
    options += ["--ro-bind", str(_CHILD), "/run/child.py", "--remount-ro", "/"]
    limits = [*_LIMITS.split(), f"--cpu={int(limit_s) + 1}"]
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "/run/child.py"]
    packages = sysconfig.get_path("purelib")
    return [bwrap, *options, "--", *limits, *python, packages, *map(str, words)]


def _seccomp() -> bytes:
    """The system call filter, as a program for the kernel's packet filter. Raises NoSandbox."""
    if platform.machine() not in _CALLS:
        raise NoSandbox(f"{_NEED} works here on {' and '.join(_CALLS)}, not {platform.machine()}")
    machine, clone = _CALLS[platform.machine()]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, refuse), (load, 0, 0, 0)]
    # Each test skips the next step if it is false.
    steps += [(at_least, 0, 1, _FIRST_X32), (end, 0, 0, refuse)]
    # C libraries try clone3 first. Its flags are in memory, which a filter cannot read.
    steps += [(equal, 0, 1, _CLONE3), (end, 0, 0, unknown)]
    for call in map(int, _REFUSED[platform.machine()].split()):
        steps += [(equal, 0, 1, call), (end, 0, 0, refuse)]
    # clone may create threads, not processes.
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, _CLONE_THREAD)]
    steps += [(end, 0, 0, refuse), (end, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _file(content: bytes) -> IO[bytes]:
    """An unnamed file with this content, at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - its user closes it
    file.write(content)
    file.seek(0)
    return file
