"""Several engines as one: each request goes to the speaker it names.

The policy's engine leads: it decides between waves and streams, and it alone is pushed to and put
to sleep. Beside it stand frozen engines, which answer in waves, and endpoints, which answer each
request on its own. All three work at the same time where they can. Knows no games.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from selfplay.engines.base import Completion, Engine, Request, Sampling
from selfplay.engines.endpoint import Endpoint

Ask = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A wave engine that is never pushed to, and the ids that end its turns."""

    engine: Engine
    stop_ids: tuple[int, ...]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer with the rollout's temperature and the speaker's own end of turn."""
        return self.engine.generate(requests, replace(sampling, stop_ids=self.stop_ids))


class EngineRouter:
    """An `Engine` that speaks with the policy's voice and with those of its partners."""

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
        by_speaker: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            by_speaker.setdefault(request.speaker, []).append(place)
        on_their_way = {
            place: self._endpoints[speaker].submit(requests[place])
            for speaker, places in by_speaker.items()
            if speaker in self._endpoints
            for place in places
        }
        answers: dict[int, Completion] = {}
        for speaker, places in by_speaker.items():
            if speaker not in self._endpoints:
                voice = self._frozen[speaker] if speaker else self._policy
                said = voice.generate([requests[place] for place in places], sampling)
                answers.update(zip(places, said, strict=True))
        answers |= {place: answer.result() for place, answer in on_their_way.items()}
        return [answers[place] for place in range(len(requests))]

    def stream(
        self, tasks: Iterable[Callable[[Ask], Awaitable[Any]]], sampling: Sampling
    ) -> list[Any]:
        """Run one coroutine a game on the policy's loop; a partner's turn delays its own games."""
        queues = {
            name: _Queue(lambda batch, voice=voice: voice.generate(batch, sampling))  # type: ignore[misc]
            for name, voice in self._frozen.items()
        }

        def routed(task: Callable[[Ask], Awaitable[Any]]) -> Callable[[Ask], Awaitable[Any]]:
            async def play(ask_policy: Ask) -> Any:
                async def ask(request: Request) -> Completion:
                    if not request.speaker:
                        return await ask_policy(request)
                    if request.speaker in queues:
                        return await queues[request.speaker].ask(request)
                    answer = self._endpoints[request.speaker].submit(request)
                    return await asyncio.wrap_future(answer)

                return await task(ask)

            return play

        return self._policy.stream([routed(task) for task in tasks], sampling)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        self._policy.update_weights(named_tensors, version)

    def sleep(self) -> None:
        self._policy.sleep()

    def wake(self, what: str) -> None:
        self._policy.wake(what)

    def close(self) -> None:
        self._policy.close()


class _Queue:
    """Turns a wave engine into one that can be awaited: what came while it was busy is its next
    wave. It works in a thread, so that the loop goes on."""

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
        await asyncio.sleep(0)  # games that are ready at this very moment join the first wave
        while self._waiting:
            wave, self._waiting = self._waiting, []
            requests = [request for request, _ in wave]
            try:
                said = await loop.run_in_executor(None, self._attempt, requests)
            except asyncio.CancelledError:
                for _, answer in wave + self._waiting:
                    answer.cancel()
                raise
            if isinstance(said, BaseException):
                # Nobody awaits this task, so whoever waits for an answer crashes with the error.
                for _, answer in wave:
                    if not answer.done():  # its game may have been cancelled
                        answer.set_exception(said)
                continue
            for (_, answer), completion in zip(wave, said, strict=True):
                if not answer.done():
                    answer.set_result(completion)

    def _attempt(self, requests: list[Request]) -> list[Completion] | BaseException:
        """One wave's completions, or whatever went wrong: an error that is not delivered would
        leave its games waiting for ever."""
        try:
            said = self._generate(requests)
        except StopIteration as error:  # a future cannot carry this one
            return RuntimeError(f"a partner's engine raised {error!r}")
        except BaseException as error:  # noqa: BLE001
            return error
        if len(said) != len(requests):
            return ValueError(
                f"a partner's engine owes {len(requests)} completions, gave {len(said)}"
            )
        return said
