"""The engine interface: prompt ids in, sampled ids out. `weight_sync/push.py` pushes weights to it.

`GameRunner.run_games` plays games: one coroutine for each game, which awaits its completions. The
SGLang engine answers each request as soon as it is done. The hf engine answers when all games wait,
as one batch (`waves`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, for a model that takes text; `role` as in chat templates."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to generate: exact prompt ids, limit of new tokens, seed of the sampling.

    `model` names the model that generates; "" is the policy. A model that takes text reads
    `messages` instead of prompt ids.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    model: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled turn: new ids, one log-prob for each, why it ended, the step of the last push.

    `version` is that step by the trainer's own count; it is not read from the engine's weights.

    The ids include the matched stop token. Log-probs are in nats, of the full softmax after the
    temperature. `finish` is "stop" or "length". A model that takes text returns `text` and no
    ids; without an answer `finish` is "void", and `text` holds the reason.
    """

    ids: list[int]
    logprobs: list[float]
    finish: str
    version: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every request of a rollout is sampled: temperature and the ids that end a turn.

    Temperature 0 is greedy, with log-probs at temperature 1.
    """

    temperature: float
    stop_ids: tuple[int, ...]


# Sends one request and waits for its completion.
Generate = Callable[[Request], Coroutine[Any, Any, Completion]]

# One game: a coroutine that gets its completions by `Generate`.
GameCoroutine = Callable[[Generate], Coroutine[Any, Any, Any]]


async def run_all(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run coroutines, or tasks that run already, concurrently; results in order.

    The first exception cancels the others, and propagates when they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class GameRunner(Protocol):
    """Plays games: what a rollout needs."""

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine for each game, passing it `generate(request)`; results in order.

        `partners` answers the requests that name another model. The first exception ends all games,
        then propagates.
        """
        ...

    def rollout(self) -> AbstractContextManager[None]:
        """Inside it requests may use what earlier ones computed; nothing of that outlives it."""
        ...


class Engine(GameRunner, Protocol):
    """Generates turns, with replaceable weights. All sizes in tokens, all times in seconds."""

    version: int

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer all requests, in order."""
        ...

    def sleep(self) -> None:
        """Free the memory of weights and cache while the trainer works, where possible."""
        ...

    def wake(self, what: str) -> None:
        """Allocate memory again: "weights" before a push, then "kv_cache" before generating."""
        ...

    def restart(self) -> None:
        """End the engine and start it again. Until the next push it has no weights or its first.

        Raises EngineFault if it does not start.
        """
        ...

    @property
    def lost(self) -> bool:
        """Whether the engine answers no more, unless it is restarted."""
        ...

    def close(self) -> None:
        """End the engine and everything it started."""
        ...
