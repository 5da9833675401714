"""When a wave is generated, and what is in it."""

import asyncio
from collections.abc import Sequence

import pytest

from selfplay.engines.base import Completion, GameCoroutine, Generate, Request
from selfplay.engines.waves import WaveScheduler
from selfplay.errors import EngineFault


def completion(request: Request) -> Completion:
    return Completion([request.seed], [0.0], "stop", 0)


class Recorded:
    """Answers each wave and keeps the seeds of its requests."""

    def __init__(self) -> None:
        self.waves: list[list[int]] = []

    def __call__(self, requests: Sequence[Request]) -> list[Completion]:
        self.waves.append([request.seed for request in requests])
        return [completion(request) for request in requests]


def game(*seeds: int) -> GameCoroutine:
    """Requests these seeds one after the other; returns the ids."""

    async def play(generate: Generate) -> list[int]:
        ids = []
        for seed in seeds:
            ids += (await generate(Request([1], 1, seed))).ids
        return ids

    return play


def test_a_wave_has_one_request_of_every_game_in_their_order() -> None:
    recorded = Recorded()
    results = WaveScheduler(recorded).run_games([game(1, 2, 3), game(10), game(20, 21)])
    assert results == [[1, 2, 3], [10], [20, 21]]
    assert recorded.waves == [[1, 10, 20], [2, 21], [3]]


def test_a_wave_waits_for_games_that_ask_later_than_others() -> None:
    recorded = Recorded()

    async def late(generate: Generate) -> list[int]:
        await asyncio.sleep(0)
        return await game(10, 11)(generate)

    WaveScheduler(recorded).run_games([game(1, 2), late])
    assert recorded.waves == [[1, 10], [2, 11]]


def test_a_game_that_a_game_starts_joins_the_next_wave() -> None:
    recorded = Recorded()

    async def branching(generate: Generate) -> None:
        await generate(Request([1], 1, 1))
        async with asyncio.TaskGroup() as spawned:
            spawned.create_task(game(100, 101)(generate))
            await generate(Request([1], 1, 2))

    WaveScheduler(recorded).run_games([branching, game(10, 11, 12)])
    assert [sorted(wave) for wave in recorded.waves] == [[1, 10], [2, 11, 100], [12, 101]]


@pytest.mark.parametrize("pauses", [0, 1, 5])
def test_no_wave_begins_while_a_game_waits_for_a_partner(pauses: int) -> None:
    """However long a partner takes, the waves are the same."""
    recorded = Recorded()

    async def partner(request: Request) -> Completion:
        for _ in range(pauses):
            await asyncio.sleep(0)
        return completion(request)

    async def with_partner(generate: Generate) -> None:
        await generate(Request([1], 1, 100, "other"))
        await generate(Request([1], 1, 2))
        await generate(Request([1], 1, 101, "other"))
        await generate(Request([1], 1, 3))

    WaveScheduler(recorded, partners=partner).run_games([game(10, 11), with_partner])
    assert recorded.waves == [[10, 2], [11, 3]]


def test_an_exception_ends_all_games_without_another_wave() -> None:
    recorded, ended = Recorded(), []

    async def waits(generate: Generate) -> None:
        try:
            await game(1, 2, 3)(generate)
        finally:
            ended.append("waits")

    async def fails(generate: Generate) -> None:
        await game(10)(generate)
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        WaveScheduler(recorded).run_games([waits, fails])
    assert (recorded.waves, ended) == ([[1, 10]], ["waits"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_the_engine_ends_all_games(error: type[BaseException]) -> None:
    def fails(requests: Sequence[Request]) -> list[Completion]:
        raise error("here")

    with pytest.raises(error, match="here"):
        WaveScheduler(fails).run_games([game(1), game(2), game(3)])


def test_too_few_completions_are_a_fault() -> None:
    with pytest.raises(EngineFault, match="returned 1 completions for 2 requests"):
        WaveScheduler(lambda requests: [completion(requests[0])]).run_games([game(1), game(2)])
