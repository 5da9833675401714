"""Several engines behind one interface: each request goes to the engine of its model.

Frozen engines answer in waves, endpoints answer each request separately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from selfplay.engines.base import (
    Completion,
    Engine,
    GameCoroutine,
    GameRunner,
    Generate,
    Request,
    Sampling,
)
from selfplay.engines.waves import WaveScheduler
from selfplay.partners.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Frozen:
    """An engine with frozen weights, and the ids that end its turns."""

    engine: Engine
    stop_ids: tuple[int, ...]

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer with the temperature of `sampling` and this model's own stop ids."""
        own = replace(sampling, stop_ids=self.stop_ids)
        completions = self.engine.generate_batch(requests, own)
        if len(completions) != len(requests):  # not the fault of the policy's engine
            raise ValueError(
                f"a partner's engine returned {len(completions)} completions for "
                f"{len(requests)} requests"
            )
        return completions


class EngineRouter(GameRunner):
    """Passes each request of a game to the policy's engine or a partner's."""

    def __init__(
        self, policy: GameRunner, *, frozen: Mapping[str, Frozen], endpoints: Mapping[str, Endpoint]
    ) -> None:
        self._policy, self._frozen, self._endpoints = policy, frozen, endpoints

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine per game with the policy's engine; results in order.

        Partners answer on the same event loop; frozen engines work in threads.
        """
        waves = {
            name: WaveScheduler(partial(frozen.generate_batch, sampling=sampling), in_thread=True)
            for name, frozen in self._frozen.items()
        }

        async def generate(request: Request) -> Completion:
            if request.model in waves:
                return await waves[request.model].generate(request)
            return await asyncio.wrap_future(self._endpoints[request.model].submit(request))

        return self._policy.run_games(games, sampling, generate)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A rollout of the policy's engine and all frozen ones. A frozen engine that was lost in
        the last attempt is restarted."""
        for frozen in self._frozen.values():
            if frozen.engine.lost:
                frozen.engine.restart()
        with ExitStack() as rollouts:
            for engine in (self._policy, *(frozen.engine for frozen in self._frozen.values())):
                rollouts.enter_context(engine.rollout())
            yield
