"""Several engines behind one interface: each request goes to the model that it names.

The policy's engine decides between waves and streams; only it takes new weights and sleeps. Frozen
engines answer in waves, endpoints answer each request on its own. All work at the same time where
they can. Knows no games.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from selfplay.engines.base import Ask, Completion, Engine, Request, Sampling, check_count
from selfplay.engines.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Frozen:
    """A wave engine with frozen weights, and the ids that end its turns."""

    engine: Engine
    stop_ids: tuple[int, ...]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer with the rollout's temperature and this model's own stop ids."""
        return self.engine.generate(requests, replace(sampling, stop_ids=self.stop_ids))


class EngineRouter:
    """An `Engine` that passes each request to the policy's engine or to a partner's."""

    def __init__(
        self, policy: Engine, *, frozen: Mapping[str, Frozen], endpoints: Mapping[str, Endpoint]
    ) -> None:
        self._policy, self._frozen, self._endpoints = policy, frozen, endpoints
        self.streaming = policy.streaming

    @property
    def version(self) -> int:
        return self._policy.version

    @version.setter
    def version(self, version: int) -> None:
        self._policy.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order; endpoints answer while the engines generate."""
        by_model: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            by_model.setdefault(request.model, []).append(place)
        from_endpoints = {
            place: self._endpoints[model].submit(requests[place])
            for model, places in by_model.items()
            if model in self._endpoints
            for place in places
        }
        answers: dict[int, Completion] = {}
        for model, places in by_model.items():
            if model not in self._endpoints:
                engine = self._frozen[model] if model else self._policy
                batch = engine.generate([requests[place] for place in places], sampling)
                if not model:
                    check_count(batch, len(places))
                answers.update(zip(places, batch, strict=True))
        answers |= {place: answer.result() for place, answer in from_endpoints.items()}
        return [answers[place] for place in range(len(requests))]

    def stream(
        self, tasks: Iterable[Callable[[Ask], Awaitable[Any]]], sampling: Sampling
    ) -> list[Any]:
        """Run one coroutine for each game on the policy's event loop; results in order.

        A partner's turn delays only its own game.
        """
        queues = {
            name: _WaveQueue(partial(engine.generate, sampling=sampling))
            for name, engine in self._frozen.items()
        }

        def routed(task: Callable[[Ask], Awaitable[Any]]) -> Callable[[Ask], Awaitable[Any]]:
            async def play(ask_policy: Ask) -> Any:
                async def ask(request: Request) -> Completion:
                    if not request.model:
                        return await ask_policy(request)
                    if request.model in queues:
                        return await queues[request.model].ask(request)
                    answer = self._endpoints[request.model].submit(request)
                    return await asyncio.wrap_future(answer)

                return await task(ask)

            return play

        return self._policy.stream([routed(task) for task in tasks], sampling)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A rollout of the policy's engine and of all frozen ones."""
        with ExitStack() as rollouts:
            for engine in (self._policy, *(frozen.engine for frozen in self._frozen.values())):
                rollouts.enter_context(engine.rollout())
            yield

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        self._policy.update_weights(named_tensors, version)

    def sleep(self) -> None:
        self._policy.sleep()

    def wake(self, what: str) -> None:
        self._policy.wake(what)

    def restart(self) -> None:
        self._policy.restart()

    def close(self) -> None:
        self._policy.close()


class _WaveQueue:
    """Awaitable access to a wave engine: requests that arrive while it is busy form the next wave.

    The engine works in a thread, so the event loop is not blocked.
    """

    def __init__(self, generate: Callable[[list[Request]], list[Completion]]) -> None:
        self._generate = generate
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._working: asyncio.Task[None] | None = None

    async def ask(self, request: Request) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._work())
        return await answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # games that are ready now join the first wave
        while self._waiting:
            wave, self._waiting = self._waiting, []
            requests = [request for request, _ in wave]
            try:
                outcome = await loop.run_in_executor(None, self._attempt, requests)
            except asyncio.CancelledError:
                for _, answer in wave + self._waiting:
                    answer.cancel()
                raise
            if isinstance(outcome, BaseException):
                # Nothing awaits this task, so the error goes to the games of this wave.
                for _, answer in wave:
                    if not answer.done():  # its game may have been cancelled
                        answer.set_exception(outcome)
                continue
            for (_, answer), completion in zip(wave, outcome, strict=True):
                if not answer.done():
                    answer.set_result(completion)

    def _attempt(self, requests: list[Request]) -> list[Completion] | BaseException:
        """One wave's completions, or the exception raised instead.

        Every exception must reach the wave's games, which would otherwise wait forever.
        """
        try:
            completions = self._generate(requests)
        except StopIteration as error:  # a future cannot hold a StopIteration
            return RuntimeError(f"a partner's engine raised {error!r}")
        except BaseException as error:  # noqa: BLE001
            return error
        if len(completions) != len(requests):
            return ValueError(
                f"a partner's engine returned {len(completions)} completions for "
                f"{len(requests)} requests"
            )
        return completions
