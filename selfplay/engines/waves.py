"""Waves: games that await single completions, on an engine that answers whole batches.

A wave is generated once every game waits for an answer, so its requests and their order are the
same in each run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, run_all
from selfplay.errors import EngineFault


class WaveScheduler:
    """Collects requests of waiting games and answers them as one batch."""

    def __init__(
        self,
        generate_batch: Callable[[list[Request]], list[Completion]],
        *,
        partners: Generate | None = None,
        in_thread: bool = False,
    ) -> None:
        """`partners` answers requests that name another model; no wave starts while one of them is
        pending. With `in_thread` a wave does not block the event loop."""
        self._generate_batch, self._partners = generate_batch, partners
        self._in_thread = in_thread
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._num_at_partners = 0
        self._error: BaseException | None = None  # of the first game that failed
        self._worker: asyncio.Task[None] | None = None

    def run_games(self, games: Iterable[GameCoroutine]) -> list[Any]:
        """Run one coroutine per game on a new event loop; results in order.

        The first exception ends all games, then propagates.
        """

        async def play(game: GameCoroutine) -> Any:
            try:
                return await game(self.generate)
            except BaseException as error:  # noqa: BLE001
                # Even an interrupt leaves the event loop as a cancellation: the loop can close.
                self._error = self._error or error
                raise asyncio.CancelledError from None

        try:
            # Not `Runner.run`: its SIGINT handler cannot interrupt a game that reads a line.
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                return runner.get_loop().run_until_complete(run_all(map(play, games)))
        except asyncio.CancelledError:
            assert self._error is not None
            raise self._error from None

    async def generate(self, request: Request) -> Completion:
        """The completion of one request, once its wave is generated."""
        if request.model and self._partners is not None:
            self._num_at_partners += 1
            try:
                return await self._partners(request)
            finally:
                self._num_at_partners -= 1
                self._wake_worker()
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._wake_worker()
        return await answer

    def _wake_worker(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        """Generate waves until no game waits, or a game waits for a partner."""
        await self._all_wait()
        while self._waiting and not self._num_at_partners and self._error is None:
            wave, self._waiting = self._waiting, []
            requests = [request for request, _ in wave]
            if self._in_thread:
                loop = asyncio.get_running_loop()
                outcome = await loop.run_in_executor(None, self._attempt, requests)
            else:
                outcome = self._attempt(requests)
            for number, (_, answer) in enumerate(wave):
                if answer.done():  # its game was cancelled
                    continue
                if isinstance(outcome, BaseException):
                    answer.set_exception(outcome)
                    return  # the exception ends all games
                answer.set_result(outcome[number])
            await self._all_wait()

    async def _all_wait(self) -> None:
        """Let the games run until an iteration of the event loop brings no new request."""
        num_waiting = -1
        while num_waiting != len(self._waiting):
            num_waiting = len(self._waiting)
            await asyncio.sleep(0)
        self._waiting = [(r, answer) for r, answer in self._waiting if not answer.done()]

    def _attempt(self, requests: list[Request]) -> list[Completion] | BaseException:
        """One wave's completions, or the exception that it raised.

        Every exception must reach a game; otherwise all games would wait forever.
        """
        try:
            completions = self._generate_batch(requests)
            if len(completions) != len(requests):
                raise EngineFault(
                    f"the engine returned {len(completions)} completions for "
                    f"{len(requests)} requests"
                )
        except StopIteration as error:  # a future cannot hold a StopIteration
            return RuntimeError(f"an engine raised {error!r}")
        except BaseException as error:  # noqa: BLE001
            return error
        return completions
