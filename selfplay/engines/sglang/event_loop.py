"""The life of a running engine: its one event loop, its processes, and how a call ends when they do
not answer.

SGLang's own calls wait for ever when a scheduler has died or hangs. Here every call ends: with its
result, with a RuntimeError that says which process ended how, or with one that counts the requests
left waiting. Times in seconds.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selfplay.engines.sglang import processes as sglang_children
from selfplay.engines.sglang.launch import Started

T = TypeVar("T")


class EngineLoop:
    """Runs coroutines on the engine's one loop (a second would hang), from its start to `close`."""

    def __init__(
        self, started: Started, signals: sglang_children.Signals, *, timeout_s: float
    ) -> None:
        self.engine, self.processes = started.engine, started.processes
        self.manager = started.engine.tokenizer_manager
        self.timeout_s = timeout_s
        self._loop = started.engine.loop
        self._signals, self._closed = signals, False
        self._dead: str | None = None
        self._death = asyncio.Event()
        self._num_waiting = 0
        self._heard_s = 0.0  # when the engine last answered, or was first asked after owing nothing
        atexit.register(self.close)
        self._loop.run_until_complete(self._free_signals())
        signals.take(self._on_death)

    async def _free_signals(self) -> None:
        # SGLang claims the signals when its receiving task starts, so start that first.
        self.manager.auto_create_handle_loop()
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self._loop.remove_signal_handler(number)

    def _on_death(self) -> None:
        """SIGQUIT: a child reports that it dies. Whoever awaits an answer or asks next is told."""
        self._dead = (
            sglang_children.how_they_ended(self.processes) or "a child process reported a failure"
        )
        self._loop.call_soon_threadsafe(self._death.set)

    def run(self, work: Coroutine[Any, Any, T], *, what: str, timeout_s: float | None = None) -> T:
        """Run `work` until it ends, the engine dies, or it owes an answer for `timeout_s`."""
        self._check_alive(work, what)
        return self._loop.run_until_complete(self._watch(work, what, timeout_s or self.timeout_s))

    def begin(self, work: Coroutine[Any, Any, T], *, what: str) -> Callable[[], T]:
        """Run `work` until it waits for the engine, which answers meanwhile; what is returned runs
        it to its end, like `run`."""
        self._check_alive(work, what)
        task = self._loop.create_task(work)

        async def sent() -> None:  # its requests leave in tasks of their own, one turn later
            for _ in range(3):
                await asyncio.sleep(0)

        async def ended() -> T:
            return await task

        self._loop.run_until_complete(sent())
        return lambda: self.run(ended(), what=what)

    def _check_alive(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        dead = self._dead or sglang_children.how_they_ended(self.processes)
        if self._closed or dead is not None:
            work.close()
            raise RuntimeError(f"the engine is gone ({dead or 'closed'}): {what} is not possible")

    def control(self, work: Coroutine[Any, Any, T], *, what: str) -> T:
        """Run one call that the engine owes an answer to, such as going to sleep."""
        return self.run(self.owed(work), what=what)

    async def owed(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, one answer that the engine owes."""
        with self.owing():
            return await work

    @contextmanager
    def owing(self) -> Iterator[None]:
        """The engine owes one answer inside this block; silence counts only while it owes any."""
        if self._num_waiting == 0:
            self._heard_s = time.perf_counter()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._heard_s = time.perf_counter()

    async def _watch(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        asked, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            while not asked.done():
                now_s = time.perf_counter()
                silent_s = now_s - self._heard_s if self._num_waiting else 0.0
                if silent_s >= timeout_s:
                    self._dead = f"silent for {timeout_s:g} s during {what}"
                    raise RuntimeError(
                        f"the engine gave no answer within {timeout_s:g} s during {what}: "
                        f"{self._num_waiting} requests wait"
                    )
                await asyncio.wait(
                    {asked, death},
                    timeout=timeout_s - silent_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if death.done():
                    raise RuntimeError(f"the engine died during {what}: {self._dead}")
            return asked.result()
        finally:
            for task in (asked, death):
                task.cancel()
            await asyncio.gather(asked, death, return_exceptions=True)

    async def drain(self, *, limit_s: float = 10.0) -> None:
        """Wait until the engine has forgotten aborted requests: it may only sleep when idle."""
        until_s = time.perf_counter() + limit_s
        while self.manager.rid_to_state and self._dead is None and time.perf_counter() < until_s:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """End the engine's processes, and only those; give the signals back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        atexit.unregister(self.engine.shutdown)
        if self.manager._subprocess_watchdog is not None:  # it would report the deaths that follow
            self.manager._subprocess_watchdog.stop()
        sglang_children.kill(self.processes)
        self._signals.sync_and_wake()
        if not self._loop.is_running():
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()
