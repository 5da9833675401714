"""The engine's child processes and the trainer's signals.

The children die with the trainer. SIGTERM still reaches the trainer's own handler while an engine
runs. Child processes import this module first, so it must import neither torch nor sglang at its
top. Times in seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
GRACE_S = 3.0  # for a handler of SIGTERM, before the process is ended


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit now if it already has.

    SGLang requests the signal too, but does not check the parent afterwards: a trainer that is
    killed while its children still import would leave them running. The kernel sends the signal
    when the thread that started the child ends, so engines start in the main thread. Systems other
    than Linux only get the check.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class ChildOf:
    """The target function of a child process, which calls `die_with_parent` when it is unpickled.

    A spawned child unpickles its target first and the target's arguments next. The arguments import
    SGLang, which takes seconds, so `die_with_parent` must run before they are unpickled.
    """

    def __init__(self, parent_pid: int, body: Callable[..., None]) -> None:
        self.parent_pid, self.body = parent_pid, body

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _enter, (self.parent_pid, self.body)


def _enter(parent_pid: int, body: Callable[..., None]) -> Callable[..., None]:
    die_with_parent(parent_pid)
    return body


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """Target of a scheduler process: one tensor-parallel rank of the engine."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from tqdm import tqdm

    from selfplay.engines.sglang import patches

    patches.apply()
    tqdm.set_lock(threading.RLock())  # its own leaves a semaphore behind, since SGLang is killed
    run_scheduler_process(*arguments, **keywords)


def run_detokenizer(*arguments: Any, **keywords: Any) -> None:
    """Target of the detokenizer process, which SGLang starts even without a tokenizer."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **keywords)


def leave_launch_alone(_signal: int, _frame: FrameType | None) -> None:
    """SIGQUIT handler during an engine's start: does nothing, because the start itself detects a
    dead child and raises. SGLang's own handler would SIGKILL the trainer without an error message.
    """


def kill(processes: Sequence[BaseProcess], *, wait_s: float = 60.0) -> None:
    """SIGKILL only these processes and their descendants; wait until they are gone.

    Raises RuntimeError when one still runs after `wait_s`.
    """
    import psutil

    descendants = []
    for process in processes:
        if process.is_alive() and process.pid is not None:
            descendants += psutil.Process(process.pid).children(recursive=True)
    for process in processes:
        process.kill()
    for descendant in descendants:
        if descendant.is_running():
            descendant.kill()
    for process in processes:
        process.join(wait_s)
    left = [str(process.pid) for process in processes if process.is_alive()]
    if left:
        raise RuntimeError(
            f"engine processes {', '.join(left)} still run {wait_s:g} s after SIGKILL"
        )


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an ordinary exit, so that `finally` blocks and `atexit` functions run."""
    raise SystemExit(128 + signal.SIGTERM)


class Signals:
    """Handles SIGTERM, and SIGQUIT while an engine of SGLang exists, in the trainer's process.

    SGLang's event loop installs handlers for both signals, but they only run while the loop runs,
    which it does not do during training. `take` routes SIGTERM to the trainer's previous handler
    (an ordinary exit if there was none) and SIGQUIT, which a dying child sends, to `on_death`, if
    it is given. Python runs handlers between bytecode instructions, so a trainer blocked in a
    collective would not handle SIGTERM at all: a thread ends the process if no handler has run
    after `GRACE_S`.
    """

    def __init__(self) -> None:
        self._on_death: Callable[[], None] | None = None
        self._previous = {
            number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)
        }
        self._handler_ran = threading.Event()
        self._wakeup: tuple[socket.socket, socket.socket, int] | None = None

    def take(self, on_death: Callable[[], None] | None = None) -> None:
        """Install the handlers. The engine's loop must not run and must have removed its own."""
        self._on_death = on_death
        signal.signal(signal.SIGTERM, self._on_term)
        if on_death is not None:
            signal.signal(signal.SIGQUIT, self._on_quit)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wakeup = (reader, writer, previous_fd)
        threading.Thread(
            target=self._end_if_stuck, args=(reader,), daemon=True, name="sigterm-grace"
        ).start()

    def restore(self) -> None:
        """Restore the handlers that were installed before the engine started."""
        if self._wakeup is not None:
            _reader, writer, previous_fd = self._wakeup
            signal.set_wakeup_fd(previous_fd)
            writer.close()  # the thread then reads end-of-stream and ends
            self._wakeup = None
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._handler_ran.set()
        previous = self._previous[signal.SIGTERM]
        if previous == signal.SIG_IGN:
            return
        (previous if callable(previous) else _leave)(number, frame)

    def _on_quit(self, _number: int, _frame: FrameType | None) -> None:
        if self._on_death is not None:
            self._on_death()

    def _end_if_stuck(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                if signal.SIGTERM in numbers and not self._handler_ran.wait(GRACE_S):
                    os._exit(128 + signal.SIGTERM)  # the kernel then ends the children
