"""The engine's child processes and the trainer's signals.

The children die with the trainer. While an engine runs, SIGTERM still reaches the trainer's own
handler. Child processes import this module first, so it must import neither torch nor sglang at the
top level. Times in seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, ClassVar

from dialop.terminal import ENDING

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
GRACE_S = 3.0  # for a SIGTERM handler, before the process is ended
ENDS_S = 5.0  # from a child's SIGQUIT to its end
KILL_S = 60.0  # longest wait for a process that was sent SIGKILL

# Variables that the children's environment must have (a value) or must not have (None), with why:
CHILD_ENVIRONMENT: dict[str, str | None] = {
    # A child that uses torchrun's store would wait for a server that does not exist.
    "TORCHELASTIC_USE_AGENT_STORE": None,
    # The memory saver and CUDA IPC both need plain cudaMalloc segments.
    "PYTORCH_CUDA_ALLOC_CONF": None,
    "PYTORCH_ALLOC_CONF": None,
    # SGLang sets it, but too late for a process that starts early.
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    # NVLink multicast can break the GPUs of a shared host.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # This version cannot free CUDA graphs while the engine sleeps; they stay in memory.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": None,
    # One message per request. By default SGLang sends one every 50 tokens, even without streaming.
    "SGLANG_FORCE_STREAM_INTERVAL": "1000000",
    # `Completion.logprobs` are log-probs after the temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": None,
    # A game may use all of its model's positions. SGLang lets no request reach the last tokens of
    # a context, so the engine's context is longer than the model's; the excess is never used.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Each process would print progress bars and warnings about missing hardware.
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit now if it already has.

    SGLang requests the signal too, but does not check the parent afterwards: a trainer that is
    killed while its children still import would leave them running. The kernel sends the signal
    when the thread that started the child ends, so engines start in the main thread. Other systems
    than Linux only get the check.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class ChildOf:
    """The target function of a child process, which calls `die_with_parent` when it is unpickled.

    A spawned child unpickles its target first, then the target's arguments. The arguments import
    SGLang, which takes seconds, so `die_with_parent` must run before they are unpickled.
    """

    def __init__(self, parent_pid: int, body: Callable[..., None]) -> None:
        self.parent_pid, self.body = parent_pid, body

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _enter, (self.parent_pid, self.body)


def _enter(parent_pid: int, body: Callable[..., None]) -> Callable[..., None]:
    die_with_parent(parent_pid)
    return body


def child_environment(device: str, tp_size: int) -> contextlib.AbstractContextManager[None]:
    """The `environment` in which SGLang's processes start."""
    wanted = dict(CHILD_ENVIRONMENT)
    if device == "cpu":
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported
    if device == "cpu" and tp_size > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp_size)
        )
    return environment(wanted)


@contextlib.contextmanager
def environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set the environment in which children start (None removes a variable); on exit, restore this
    process's own.

    This also undoes an engine's edits: SGLang sets CUDA_DEVICE_MAX_CONNECTIONS=8 and other
    variables in the process that starts it, and resets root logging.
    """
    before, root = dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for name, value in wanted.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        root.handlers[:] = handlers
        root.setLevel(level)


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """Target of a scheduler process: one tensor-parallel rank of the engine."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from tqdm import tqdm

    from selfplay.engines.sglang.fast import patches

    patches.apply(arguments[0])
    tqdm.set_lock(threading.RLock())  # its default leaks a semaphore, because SGLang is killed
    run_scheduler_process(*arguments, **keywords)


def run_detokenizer(*_arguments: Any, **_keywords: Any) -> None:
    """Target of the detokenizer process, which SGLang starts even without a tokenizer. It waits to
    be killed: with `skip_tokenizer_init` the schedulers send token ids straight to the trainer."""
    while True:
        signal.pause()


def leave_launch_alone(_signal: int, _frame: FrameType | None) -> None:
    """SIGQUIT handler during an engine's start. It does nothing, because the start itself detects a
    dead child and raises. SGLang's own handler would SIGKILL the trainer without an error message.
    """


def kill(processes: Sequence[BaseProcess]) -> None:
    """SIGKILL these processes and their descendants; wait until they are gone.

    Raises RuntimeError if one still runs after KILL_S.
    """
    import psutil

    descendants = []
    for process in processes:
        if process.is_alive() and process.pid is not None:
            descendants += psutil.Process(process.pid).children(recursive=True)
    for process in processes:
        process.kill()
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended
            descendant.kill()
    until_s = time.perf_counter() + KILL_S
    for process in processes:
        process.join(KILL_S)
    # While a thread of the engine's front end reaps a process, it looks alive for a moment.
    while left := [str(process.pid) for process in processes if process.is_alive()]:
        if time.perf_counter() < until_s:
            time.sleep(0.01)
            continue
        raise RuntimeError(
            f"engine processes {', '.join(left)} still run {KILL_S:g} s after SIGKILL"
        )


def _leave(number: int, _frame: FrameType | None) -> None:
    """Turn a signal into a normal exit, so that `finally` blocks and `atexit` functions run."""
    raise SystemExit(128 + number)


class Signals:
    """Handles the signals that end a program (`ENDING`) in the trainer's process.

    SGLang's event loop installs handlers for SIGTERM and SIGQUIT, but they only run while the loop
    runs, which it does not do during training. `take` routes each signal to the trainer's previous
    handler (a normal exit if there was none; an ignored signal stays ignored). SIGQUIT, which a
    dying child sends, goes to the `on_death` of the engine whose child it is. Python runs handlers
    between bytecode instructions, so a trainer blocked in a collective would not handle them at
    all: a thread ends the process if no handler has run after `GRACE_S`.

    A run and each of its engines take the signals, and restore them in any order. After the last
    taker the handlers from before the first one are back.
    """

    _takers: ClassVar[list[Signals]] = []
    _previous: ClassVar[dict[signal.Signals, Any]] = {}  # handlers before the first taker
    _wakeup: ClassVar[tuple[socket.socket, int] | None] = None  # the writer, the descriptor before
    _handler_ran: ClassVar[threading.Event] = threading.Event()

    def __init__(self) -> None:
        """Create it before an engine starts, because the engine's loop replaces the handlers."""
        self._on_death: Callable[[], None] | None = None
        self._has_died: Callable[[], bool] = bool
        self._before = {number: signal.getsignal(number) for number in ENDING}

    def take(
        self, on_death: Callable[[], None] | None = None, has_died: Callable[[], bool] = bool
    ) -> None:
        """Install the handlers. The engine's loop must be idle and must have removed its own.

        `has_died` says whether a child of the engine has ended since its last `on_death`; False by
        default."""
        self._on_death, self._has_died = on_death, has_died
        if not Signals._takers:
            Signals._previous = self._before
        Signals._takers.append(self)
        self._install()
        if Signals._wakeup is None:
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            Signals._wakeup, Signals._handler_ran = (writer, before), threading.Event()
            threading.Thread(
                target=_end_if_stuck,
                args=(reader, Signals._handler_ran),
                daemon=True,
                name="sigterm-grace",
            ).start()
        else:  # the engine's loop has replaced it
            signal.set_wakeup_fd(Signals._wakeup[0].fileno(), warn_on_full_buffer=False)

    def restore(self) -> None:
        """Stop handling the signals for this taker."""
        if self not in Signals._takers:
            return
        Signals._takers.remove(self)
        if not Signals._takers and Signals._wakeup is not None:
            writer, before = Signals._wakeup
            signal.set_wakeup_fd(before)
            writer.close()  # the thread then reads end-of-stream and ends
            Signals._wakeup = None
        self._install()

    @staticmethod
    def _install() -> None:
        """Install the handlers for the current takers, or the previous ones if there are none."""
        quits = any(taker._on_death is not None for taker in Signals._takers)
        for number in ENDING:
            handler = Signals._on_quit if quits and number == signal.SIGQUIT else Signals._on_end
            previous = Signals._previous[number]
            ours = Signals._takers and (previous != signal.SIG_IGN or handler != Signals._on_end)
            unset = signal.SIG_DFL if previous is None else previous
            signal.signal(number, handler if ours else unset)

    @staticmethod
    def _on_end(number: int, frame: FrameType | None) -> None:
        Signals._handler_ran.set()
        previous = Signals._previous[signal.Signals(number)]
        (previous if callable(previous) else _leave)(number, frame)

    @staticmethod
    def _on_quit(_number: int, _frame: FrameType | None) -> None:
        """Tell the engines of which a child has ended. A child that failed sends the signal shortly
        before it ends; if none ends, as one that hangs, all engines are told."""
        engines = [taker for taker in Signals._takers if taker._on_death is not None]
        died, until_s = list[Signals](), time.monotonic() + ENDS_S
        while len(engines) > 1 and not died and time.monotonic() < until_s:
            died = [taker for taker in engines if taker._has_died()]
            time.sleep(0.0 if died else 0.02)
        for taker in died or engines:
            assert taker._on_death is not None
            taker._on_death()


def _end_if_stuck(reader: socket.socket, handler_ran: threading.Event) -> None:
    with reader:
        while numbers := reader.recv(16):
            # SIGQUIT may come from a dying child, after which the program continues.
            ends = (number for number in numbers if number in ENDING and number != signal.SIGQUIT)
            if (ending := next(ends, None)) is None:
                continue
            if not handler_ran.wait(GRACE_S):
                os._exit(128 + ending)  # the kernel then ends the children
