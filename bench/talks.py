"""Two-seat games whose turns have natural lengths although the weights are random.

A policy with random weights never ends a turn. Here a turn's length is drawn from a geometric
distribution and given to the engine as the request's limit.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from dialop.game import Game, Outcome, Prompt, Step
from selfplay.config import Config
from selfplay.engines.base import Completion, GameCoroutine, GameRunner, Generate, Request, Sampling
from selfplay.rollout.episode import GameSetup
from selfplay.rollout.seating import Cast, policy_player

TURNS, GROUP = 10, 8


class Talk(Game):
    """Every text is a message to the other seat; over after TURNS turns."""

    num_seats = 2

    def __init__(self, inner: Game) -> None:
        self._inner, self._num = inner, 0

    @property
    def seat_to_move(self) -> int | None:
        return None if self._num >= TURNS else self._num % 2

    def prompt(self, seat: int) -> Prompt:
        return self._inner.prompt(seat)

    def step(self, seat: int, text: str) -> Step:
        self._num += 1
        observations = ["", ""]
        observations[1 - seat] = f"Partner: {text[:200]}"
        return Step(seat, "message", None, None, tuple(observations))

    def clone(self) -> Game:
        twin = Talk(self._inner)
        twin._num = self._num
        return twin

    def view(self, seat: int) -> None:
        return None

    def outcome(self) -> Outcome:
        over = self._num >= TURNS
        return Outcome(over=over, agreed=False, score=0.0, score_norm=0.0, rewards=(0.0, 0.0))

    def state(self) -> dict[str, Any]:
        return {}


class Watched(GameRunner):
    """Wraps what runs games to record the end time of each turn and the busy seconds of the driver.

    It only streams games. With `mean` each turn's length is drawn from a geometric distribution and
    the turn counts as ended by a stop token.
    """

    def __init__(self, engine: GameRunner, mean: int | None) -> None:
        self._engine, self._mean = engine, mean
        self.ends: list[float] = []
        self.driver_s = 0.0

    def run_games(
        self, games: Iterable[GameCoroutine], sampling: Sampling, partners: Generate | None = None
    ) -> list[Any]:
        def watched(game: GameCoroutine) -> GameCoroutine:
            async def play(generate: Generate) -> Any:
                since = time.perf_counter()

                async def asked(request: Request) -> Completion:
                    # Between an answer and the next request of a game only the driver runs.
                    nonlocal since
                    self.driver_s += time.perf_counter() - since
                    if self._mean is None:
                        completion = await generate(request)
                    else:
                        draw = 1.0 - random.Random(request.seed).random()
                        length = 1 + int(math.log(draw) / math.log(1.0 - 1.0 / self._mean))
                        limit = min(length, 4 * self._mean, request.max_new_tokens)
                        completion = await generate(
                            dataclasses.replace(request, max_new_tokens=limit)
                        )
                        completion = dataclasses.replace(completion, finish="stop")
                    since = time.perf_counter()
                    self.ends.append(since)
                    return completion

                return await game(asked)

            return play

        return self._engine.run_games([watched(game) for game in games], sampling, partners)

    def rollout(self) -> AbstractContextManager[None]:
        return self._engine.rollout()


def talks(
    instances: Iterable[Any], config: Config, cast: Cast, mean: int, step: int
) -> list[GameSetup]:
    """Games of TURNS turns on these instances of a step, GROUP of each."""
    kit = config.game.kit
    rollout = dataclasses.replace(config.rollout, max_new_tokens=4 * mean)
    return [
        GameSetup(
            Talk(kit.new_game(instance, config.game.options)),
            tuple(
                policy_player((step, instance.key, i, seat), rollout, cast[seat]) for seat in (0, 1)
            ),
            instance.key,
            i,
        )
        for instance in instances
        for i in range(GROUP)
    ]
