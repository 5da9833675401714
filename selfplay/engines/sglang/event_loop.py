"""The engine's event loop: runs calls to the engine and ends calls that get no answer.

SGLang's own calls wait forever if a scheduler has died or hangs. Here every call ends with its
result, with an EngineFault that names the dead process and its exit code, or, after a time-out,
with an EngineFault that counts the unanswered requests. Times in seconds.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selfplay.engines.sglang import processes
from selfplay.engines.sglang.launch import Started
from selfplay.errors import EngineFault

T = TypeVar("T")


class EngineLoop(ABC):
    """Runs coroutines on the one event loop of an engine."""

    def __init__(self, started: Started, signals: processes.Signals, *, timeout_s: float) -> None:
        self.engines, self.children = started.engines, started.processes
        self.timeout_s = timeout_s
        self._loop = started.engines[0].loop
        self._signals, self._closed = signals, False
        self._dead: str | None = None
        self._death = asyncio.Event()
        self._num_waiting = 0
        self._silent_since_s = 0.0  # time of the last answer, or of the first request after a pause
        atexit.register(self.close)
        self._loop.run_until_complete(self._free_signals())
        signals.take(self._on_death)

    async def _free_signals(self) -> None:
        """Let SGLang install its own handlers, then remove them."""
        await self._install_handlers()
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self._loop.remove_signal_handler(number)

    @abstractmethod
    async def _install_handlers(self) -> None:
        """Start SGLang's receiving tasks, which install them."""

    def _on_death(self) -> None:
        """Handle SIGQUIT from a dying child: fail the current call and all later ones."""
        self._dead = self._ended() or "a child process reported a failure"
        self._loop.call_soon_threadsafe(self._death.set)

    def _ended(self) -> str | None:
        """The pids and exit codes of processes that have ended, as text; None while all run."""
        ended = (p for p in self.children if not p.is_alive())
        return ", ".join(f"pid {p.pid} with exit code {p.exitcode}" for p in ended) or None

    def run(self, work: Coroutine[Any, Any, T], *, what: str, timeout_s: float | None = None) -> T:
        """Run `work` to its end and return its result.

        Raises EngineFault, which names the work as `what`, if the engine dies or, while answers
        are due, is silent for `timeout_s`.
        """
        self.check_alive(what, work)
        return self._loop.run_until_complete(self._watch(work, what, timeout_s or self.timeout_s))

    def begin(self, work: Coroutine[Any, Any, T], *, what: str) -> Callable[[], T]:
        """Start `work` and return once its requests are sent; the engine works on them meanwhile.

        The returned function waits for the result and raises like `run`.
        """
        self.check_alive(what, work)
        task = self._loop.create_task(work)

        async def sent() -> None:  # the requests leave in tasks that need a few iterations
            for _ in range(3):
                await asyncio.sleep(0)

        async def ended() -> T:
            return await task

        self._loop.run_until_complete(sent())
        return lambda: self.run(ended(), what=what)

    def check_alive(self, what: str, work: Coroutine[Any, Any, Any] | None = None) -> None:
        """If the engine is gone, close `work` and raise EngineFault, which names it as `what`."""
        dead = self._dead or self._ended()
        if self._closed or dead is not None:
            if work is not None:
                work.close()
            raise EngineFault(f"the engine is gone ({dead or 'closed'}): {what} is not possible")

    @property
    def lost(self) -> bool:
        """Whether every later call would fail."""
        return self._closed or self._dead is not None or self._ended() is not None

    @contextmanager
    def pending_answer(self) -> Iterator[None]:
        """Marks an answer as due inside the block. The time-out runs only while one is due."""
        if self._num_waiting == 0:
            self._silent_since_s = time.perf_counter()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._silent_since_s = time.perf_counter()

    async def _watch(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        running, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        # While the trainer did something else, answers waited unread: the engine was not silent.
        self._silent_since_s = time.perf_counter()
        try:
            while not running.done():
                now_s = time.perf_counter()
                silent_s = now_s - self._silent_since_s if self._num_waiting else 0.0
                if silent_s >= timeout_s:
                    self._dead = f"silent for {timeout_s:g} s during {what}"
                    raise EngineFault(
                        f"the engine gave no answer within {timeout_s:g} s during {what}: "
                        f"{self._num_waiting} requests wait"
                    )
                await asyncio.wait(
                    {running, death},
                    timeout=timeout_s - silent_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if death.done():
                    raise EngineFault(f"the engine died during {what}: {self._dead}")
            return running.result()
        finally:
            for task in (running, death):
                task.cancel()
            await asyncio.gather(running, death, return_exceptions=True)

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the engine has dropped aborted requests: it must be idle before it sleeps."""

    def close(self) -> None:
        """Kill only the engine's processes and restore signal handlers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for engine in self.engines:
            atexit.unregister(engine.shutdown)
            watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
            if watchdog is not None:
                watchdog.stop()  # otherwise it would report the kills
        processes.kill(self.children)
        self._signals.restore()
        if not self._loop.is_running():
            self._loop.run_until_complete(self._cancel_tasks())
            for engine in self.engines:
                # A garbage-collected context would wait forever to send to the dead processes.
                manager = engine.tokenizer_manager
                for front, name in ((manager, "recv_from_detokenizer"), (engine, "send_to_rpc")):
                    if (socket := getattr(front, name, None)) is not None:
                        socket.context.destroy(linger=0)
                engine.loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
