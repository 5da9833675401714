"""Several engines behind one interface: each request goes to the engine of its model.

Frozen engines answer in waves, endpoints answer each request separately, the engines of other
policies in training as `Engine.answering` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
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


@dataclass(slots=True)
class Frozen:
    """An engine with frozen weights, the ids that end its turns, and what loads its weights again
    if they are not those of its folder."""

    engine: Engine
    stop_ids: tuple[int, ...]
    reload: Callable[[], None] | None = None

    def restart(self) -> None:
        """Restart the engine, with its weights."""
        self.engine.restart()
        if self.reload is not None:
            self.reload()

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


@dataclass(frozen=True, slots=True)
class Live:
    """The engine of another policy in training, and the ids that end its turns."""

    engine: Engine
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _InGame(Request):
    """A request to a live engine, with the `generate` of its game there."""

    generate: Generate | None = None


class EngineRouter(GameRunner):
    """Passes each request of a game to the engine of its model: the policy's, that of another
    policy in training, or a partner's."""

    def __init__(
        self,
        policy: GameRunner,
        *,
        frozen: Mapping[str, Frozen],
        endpoints: Mapping[str, Endpoint],
        live: Mapping[str, Live] = MappingProxyType({}),
    ) -> None:
        """`policy` runs the games, and its own requests name no model; with several policies `live`
        has the others by name."""
        self._policy, self._frozen, self._endpoints = policy, frozen, endpoints
        self._live = live

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        """Run one coroutine per game with the policy's engine; results in order.

        All others answer on the same event loop; frozen engines work in threads. A live engine has
        the temperature of `sampling` and its own stop ids.
        """
        waves = {
            name: WaveScheduler(partial(frozen.generate_batch, sampling=sampling), in_thread=True)
            for name, frozen in self._frozen.items()
        }

        async def generate(request: Request) -> Completion:
            if isinstance(request, _InGame) and request.generate is not None:
                return await request.generate(request)
            if request.model in waves:
                return await waves[request.model].generate(request)
            return await asyncio.wrap_future(self._endpoints[request.model].submit(request))

        if self._live:
            answering = {
                name: live.engine.answering(replace(sampling, stop_ids=live.stop_ids))
                for name, live in self._live.items()
            }
            games = [partial(self._play, game, answering) for game in games]
        return self._policy.run_games(games, sampling, generate)

    async def _play(
        self,
        game: GameCoroutine,
        answering: Mapping[str, Callable[[], AbstractContextManager[Generate]]],
        generate: Generate,
    ) -> Any:
        """One game of several policies. Its requests to live engines pass through the engine that
        runs the games too, which may wait for them before it begins a wave."""
        opened: dict[str, Generate] = {}
        with ExitStack() as until_end:

            async def of_game(request: Request) -> Completion:
                name = request.model
                if name not in answering:
                    return await generate(request)
                if name not in opened:
                    opened[name] = until_end.enter_context(answering[name]())
                asked = {field.name: getattr(request, field.name) for field in fields(Request)}
                return await generate(_InGame(**asked, generate=opened[name]))

            return await game(of_game)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A rollout of every engine. A frozen engine that was lost in the last attempt is
        restarted."""
        for each in self._frozen.values():
            if each.engine.lost:
                each.restart()
        frozen = [each.engine for each in self._frozen.values()]
        others = [*(each.engine for each in self._live.values()), *frozen]
        with ExitStack() as rollouts:
            for runner in (self._policy, *others):
                rollouts.enter_context(runner.rollout())
            yield
