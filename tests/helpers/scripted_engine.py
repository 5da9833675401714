"""Engines that say what a test prepared, one waking all games at once, one each on its own."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from selfplay.chat.rendering import Rendering
from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.waves import WaveScheduler

CUT = "…"  # a prepared text that ends with this was cut off at its limit


class WaveEngine:
    """Answers each request with the text prepared for its seed; the k-th id has log-prob -k."""

    version = 3
    lost = False

    def __init__(self, rendering: Rendering, texts: Mapping[int, str]) -> None:
        self.rendering, self.texts = rendering, texts
        self.asked: list[Request] = []
        self.waves: list[int] = []

    def answer(self, request: Request) -> Completion:
        self.asked.append(request)
        text = self.texts[request.seed]
        ids = self.rendering.action_ids(text.removesuffix(CUT))
        said = ids[:-1] if text.endswith(CUT) else ids
        said = said[: request.max_new_tokens]
        logprobs = [-float(k) for k in range(1, len(said) + 1)]
        finish = "stop" if len(said) == len(ids) else "length"
        return Completion(said, logprobs, finish, self.version)

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.waves.append(len(requests))
        return [self.answer(request) for request in requests]

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        waves = WaveScheduler(partial(self.generate_batch, sampling=sampling), partners=partners)
        return waves.run_games(games)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        self.version = version

    def sleep(self) -> None: ...

    def wake(self, what: str) -> None: ...

    def close(self) -> None: ...


class StreamEngine(WaveEngine):
    """The same answers, each after a while that differs from game to game and turn to turn."""

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        raise AssertionError("a streaming engine never gets a wave")

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        async def generate(request: Request) -> Completion:
            if request.model and partners is not None:
                return await partners(request)
            for _ in range(1 + request.seed % 5):
                await asyncio.sleep(0)
            return self.answer(request)

        async def play_all() -> list[Any]:
            return list(await asyncio.gather(*(game(generate) for game in games)))

        return asyncio.run(play_all())
