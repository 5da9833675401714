"""The engine's event loop: runs calls to the engine and ends calls that get no answer.

SGLang's own calls wait forever if a scheduler has died or hangs. Here every call ends with its
result, with an EngineFault that names the dead process and its exit code, or, after a time-out,
with an EngineFault that counts the unanswered requests. The engines of several policies share one
event loop, so that each can answer in the games of another. Times in seconds.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from selfplay.engines.sglang import processes
from selfplay.engines.sglang.launch import Started
from selfplay.errors import EngineFault

T = TypeVar("T")


class EngineLoop(ABC):
    """Runs an engine's coroutines, on one event loop with the engines of this process's other
    policies."""

    of_policies: ClassVar[list[EngineLoop]] = []  # all that are open, on one event loop

    def __init__(
        self, started: Started, signals: processes.Signals, *, timeout_s: float, alone: bool = False
    ) -> None:
        """`alone` gives it an event loop of its own, which another thread may run. `sharing` are
        the engines of its event loop."""
        self.engines, self.children = started.engines, started.processes
        self.timeout_s = timeout_s
        self.sharing = [] if alone else EngineLoop.of_policies
        self._loop: asyncio.AbstractEventLoop
        self._loop = self.sharing[0]._loop if self.sharing else started.engines[0].loop
        for engine in started.engines:
            if engine.loop is not self._loop:
                engine.loop.close()
                engine.loop = self._loop
        asyncio.set_event_loop(self._loop)  # for SGLang's calls while it does not run
        self.sharing.append(self)
        self._signals, self._closed = signals, False
        self._dead: str | None = None
        self._death = asyncio.Event()
        self._num_waiting = 0
        self._silent_since_s = 0.0  # time of the last answer, or of the first request after a pause
        self._tasks = set[asyncio.Task[Any]]()  # this engine's, if it is closed before the loop
        atexit.register(self.close)
        self._loop.run_until_complete(self._free_signals())
        signals.take(self._on_death, lambda: self._dead is None and self._ended() is not None)

    async def _free_signals(self) -> None:
        """Let SGLang install its own handlers, then remove them."""
        before = asyncio.all_tasks()
        await self._install_handlers()
        self._tasks |= asyncio.all_tasks() - before
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
        are due, is silent for `timeout_s`; also if that happens to another engine of this event
        loop that owes an answer.
        """
        self.check_alive(what, work)
        silence_s = {each: each.timeout_s for each in self.sharing}
        silence_s[self] = timeout_s or self.timeout_s
        return self._loop.run_until_complete(self._watch(work, what, silence_s))

    def begin(self, work: Coroutine[Any, Any, T], *, what: str) -> Callable[[], T]:
        """Start `work` and return once its requests are sent; the engine works on them meanwhile.

        The returned function waits for the result and raises like `run`.
        """
        self.check_alive(what, work)
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    def died(self, what: str) -> EngineFault:
        """The fault of an engine that died, or was silent for too long, during `what`.

        The message is the same whether the watch or a request in a game notices it first.
        """
        return EngineFault(f"the engine died during {what}: {self._dead or self._ended()}")

    @property
    def lost(self) -> bool:
        """Whether every later call would fail."""
        return self._closed or self._dead is not None or self._ended() is not None

    @contextmanager
    def pending_answer(self) -> Iterator[None]:
        """Marks an answer as due inside the block. The time-out runs only while one is due. Raises
        EngineFault if the engine has died while it owed none, which no other engine's call sees."""
        if self._num_waiting == 0:
            if self.lost:
                raise self.died("generation")
            self._silent_since_s = time.perf_counter()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._silent_since_s = time.perf_counter()

    async def _watch(
        self, work: Coroutine[Any, Any, T], what: str, watched: Mapping[EngineLoop, float]
    ) -> T:
        """The result of `work`; `watched` are the engines with their longest silence in seconds."""
        running = asyncio.ensure_future(work)
        deaths = {each: asyncio.ensure_future(each._death.wait()) for each in watched}
        for each in watched:
            # While the trainer did something else, answers waited unread: no engine was silent.
            each._silent_since_s = time.perf_counter()
        try:
            while not running.done():
                left_s = min(each._check_silence(what, watched[each]) for each in watched)
                await asyncio.wait(
                    {running, *(death for death in deaths.values() if not death.done())},
                    timeout=left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for each, death in deaths.items():
                    if death.done() and (each is self or each._num_waiting):
                        raise each.died(what)
            return running.result()
        finally:
            for task in (running, *deaths.values()):
                task.cancel()
            await asyncio.gather(running, *deaths.values(), return_exceptions=True)

    def _check_silence(self, what: str, timeout_s: float) -> float:
        """The seconds until the engine will have been silent for `timeout_s`. Raises EngineFault if
        it has been."""
        silent_s = time.perf_counter() - self._silent_since_s if self._num_waiting else 0.0
        if silent_s >= timeout_s:
            self._dead = f"silent for {timeout_s:g} s during {what}"
            raise EngineFault(
                f"the engine gave no answer within {timeout_s:g} s during {what}: "
                f"{self._num_waiting} requests wait"
            )
        return timeout_s - silent_s

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the engine has dropped aborted requests: it must be idle before it sleeps."""

    def close(self) -> None:
        """Kill only the engine's processes and restore signal handlers. Safe to call twice. The
        event loop ends with its last engine."""
        if self._closed:
            return
        self._closed = True
        self.sharing.remove(self)
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
            if not self.sharing:
                self._loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = set(self._tasks)
        if not self.sharing:
            tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
