"""Streaming sessions with the real engine: the same log-probs, a bounded cache, nothing left."""

from __future__ import annotations

import random
from typing import Any

import pytest

from selfplay.engines.base import Completion, GameCoroutine, Generate, Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.weights import Weights
from tests.sglang import tiny

pytestmark = pytest.mark.fast_engine

SESSIONS = True

PLAIN = Sampling(1.0, (tiny.STOP,))
PROMPT = list(range(10, 50))
Turns = list[tuple[list[int], Completion]]


def game(seed: int, *, turns: int = 8) -> GameCoroutine:
    """Two seats by turns, each reads something after the other's turn; games 0 to 7 share prompts,
    8 to 15, and so on."""

    async def play(generate: Generate) -> Turns:
        draws, played = random.Random(seed), []
        seats = [[10 + seed // 8, seat, *PROMPT] for seat in range(2)]
        for num in range(turns):
            ids = seats[num % 2]
            completion = await generate(Request(list(ids), draws.randrange(1, 16), 0))
            played.append((list(ids), completion))
            ids += [*completion.ids, 7]
            seats[1 - num % 2] += [8] * draws.randrange(1, 9)
        return played

    return play


def worst(model: Any, games: list[Turns]) -> float:
    return max(tiny.worst_mismatch(model, ids, answer) for turns in games for ids, answer in turns)


def free(engine: SGLangEngine) -> tuple[int, int]:
    pool = engine.pools[0]
    return pool.free_slots, pool.num_tokens


def test_every_turn_has_the_log_probs_of_its_whole_context(
    engine: SGLangEngine, policy: Any
) -> None:
    empty = free(engine)
    games = engine.run_games([game(n) for n in range(16)], PLAIN)
    assert worst(policy, games) < 1e-4
    assert free(engine) == empty == (2 * tiny.ENGINE["max_batch"], 0)


def test_a_later_turn_computes_only_what_is_new(engine: SGLangEngine, policy: Any) -> None:
    """The context before it is cached; the last sampled token only if the step that would have
    followed had already begun."""

    async def two_turns(generate: Any) -> tuple[int, int]:
        first = await generate(Request(PROMPT, 6, 0))
        before = engine.counters.num_cached_tokens
        await generate(Request([*PROMPT, *first.ids, 60, 61], 1, 0))
        return engine.counters.num_cached_tokens - before, len(PROMPT) + len(first.ids) - 1

    [(cached, wanted)] = engine.run_games([two_turns], PLAIN)
    assert cached in (wanted, wanted + 1)


def test_games_beyond_the_pool_play_on_without_sessions(engine: SGLangEngine, policy: Any) -> None:
    pool = engine.pools[0]
    slots, tokens = pool.free_slots, pool.max_tokens
    few = [game(n) for n in range(32)]
    try:
        pool.max_tokens = 600  # about nine seats of 70 tokens
        games = engine.run_games(few, PLAIN)
        assert worst(policy, games) < 1e-4 and free(engine) == (slots, 0)
        pool.max_tokens, pool.free_slots = tokens, 5
        games = engine.run_games(few, PLAIN)
        assert worst(policy, games) < 1e-4 and free(engine) == (5, 0)
    finally:
        pool.max_tokens, pool.free_slots = tokens, slots


def test_a_push_between_two_rollouts_is_heard_in_every_turn(
    engine: SGLangEngine, policy: Any
) -> None:
    engine.run_games([game(n) for n in range(8)], PLAIN)
    other = tiny.moved(policy, seed=1)
    engine.load(Weights(other, engine.dtype), engine.version + 1)
    assert worst(other, engine.run_games([game(n) for n in range(8)], PLAIN)) < 1e-4


def test_a_failing_game_leaves_no_session_and_an_engine_that_plays_on(
    engine: SGLangEngine, policy: Any
) -> None:
    empty = free(engine)

    async def long(generate: Any) -> None:
        first = await generate(Request(PROMPT, 4, 0))
        await generate(Request([*PROMPT, *first.ids, 60], 400, 0))

    async def fails(generate: Any) -> None:
        for num in range(12):
            await generate(Request([*PROMPT, num], 2, 0))
        raise KeyError("a bug in game 7")

    with pytest.raises(KeyError, match="game 7"):
        engine.run_games([long, fails, *[long] * 20], Sampling(1.0, ()))
    assert free(engine) == empty
    assert worst(policy, engine.run_games([game(n) for n in range(16)], PLAIN)) < 1e-4
    engine.flush_cache("the test")  # the process is idle
    assert free(engine) == empty


def test_the_cache_of_ended_games_is_free_again(engine: SGLangEngine, policy: Any) -> None:
    """More tokens than the cache of 8,192 holds, in new prompts each time."""
    for repeat in range(4):
        games = engine.run_games([game(100 + 16 * repeat + n, turns=10) for n in range(16)], PLAIN)
        assert worst(policy, games) < 1e-4
    tokens = sum(len(ids) + len(answer.ids) for turns in games for ids, answer in turns[-2:])
    assert 4 * tokens > engine.cache_tokens
