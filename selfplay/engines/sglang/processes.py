"""The engine's child processes: they die with the trainer, and a signal meant for the trainer
reaches it.

Child processes import this module first, so it stays light: no torch, no sglang at its top. Times
in seconds.
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


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends, and end now if it already has.

    SGLang asks for the signal too, but without the look back: a trainer killed while its children
    still import would leave them behind. The kernel ties the signal to the thread that started the
    child, so engines start in the main thread. Linux only; elsewhere the look back is all there is.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class ChildOf:
    """The body of a child process that ends with `parent_pid`, from the moment the child unpickles
    it.

    A spawned child unpickles its target first and the target's arguments next; those import SGLang,
    which takes seconds. So the guard stands before them.
    """

    def __init__(self, parent_pid: int, body: Callable[..., None]) -> None:
        self.parent_pid, self.body = parent_pid, body

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _enter, (self.parent_pid, self.body)


def _enter(parent_pid: int, body: Callable[..., None]) -> Callable[..., None]:
    die_with_parent(parent_pid)
    return body


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """Body of a scheduler process: one tensor-parallel rank of the engine."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments, **keywords)


def run_detokenizer(*arguments: Any, **keywords: Any) -> None:
    """Body of the detokenizer process, which SGLang starts even for ids in, ids out."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **keywords)


def leave_launch_alone(_signal: int, _frame: FrameType | None) -> None:
    """SIGQUIT handler while the engine starts: do nothing, since the start notices a dead child and
    raises.

    SGLang's own handler would SIGKILL the trainer, and nobody would read why.
    """


def kill(processes: Sequence[BaseProcess], *, wait_s: float = 60.0) -> None:
    """SIGKILL these processes and what they started, nothing else, and wait until they are gone."""
    import psutil

    below = []
    for process in processes:
        if process.is_alive() and process.pid is not None:
            below += psutil.Process(process.pid).children(recursive=True)
    for process in processes:
        process.kill()
    for grandchild in below:
        if grandchild.is_running():
            grandchild.kill()
    for process in processes:
        process.join(wait_s)
    left = [str(process.pid) for process in processes if process.is_alive()]
    if left:
        raise RuntimeError(
            f"engine processes {', '.join(left)} still run {wait_s:g} s after SIGKILL"
        )


def how_they_ended(processes: Sequence[BaseProcess]) -> str | None:
    """A sentence part on the processes that have ended, None while all run."""
    ended = [f"pid {p.pid} with exit code {p.exitcode}" for p in processes if not p.is_alive()]
    return ", ".join(ended) or None


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM as an ordinary exit: `finally` and `atexit` run, logs get written, engines closed."""
    raise SystemExit(128 + signal.SIGTERM)


class Signals:
    """SIGTERM and SIGQUIT of a process that holds an engine, from the engine's start to its end.

    SGLang's event loop takes both signals and handles them only while it runs, that is never during
    training. `take` gives SIGTERM back to the trainer's own handler (an ordinary exit if it had
    none) and SIGQUIT, with which a dying child reports, to `on_death`. Python runs handlers between
    its own instructions, so a trainer that waits inside a collective would never hear SIGTERM: a
    thread ends the process if the handler has not run after `grace_s`.
    """

    def __init__(self, *, grace_s: float = 3.0) -> None:
        self._on_death: Callable[[], None] | None = None
        self._grace_s = grace_s
        self._previous = {
            number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)
        }
        self._heard = threading.Event()
        self._wakeup: tuple[socket.socket, socket.socket, int] | None = None

    def take(self, on_death: Callable[[], None]) -> None:
        """Take both signals. The engine's loop has let go of them and does not run."""
        self._on_death = on_death
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGQUIT, self._on_quit)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wakeup = (reader, writer, previous_fd)
        threading.Thread(
            target=self._end_if_stuck, args=(reader,), daemon=True, name="sigterm-grace"
        ).start()

    def sync_and_wake(self) -> None:
        """Restore the handlers found at the start."""
        if self._wakeup is not None:
            _reader, writer, previous_fd = self._wakeup
            signal.set_wakeup_fd(previous_fd)
            writer.close()  # the thread reads the end of the stream and ends
            self._wakeup = None
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._heard.set()
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
                if signal.SIGTERM in numbers and not self._heard.wait(self._grace_s):
                    os._exit(128 + signal.SIGTERM)  # the kernel then ends the children
