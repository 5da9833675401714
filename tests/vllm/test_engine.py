"""`VLLMEngine` with the real engine: completions, seeds, weights, refusals."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from selfplay.engines.base import GameCoroutine, Generate, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.errors import SettingsError
from selfplay.extras.vllm import VLLMEngine
from selfplay.extras.vllm_options import VLLMOptions
from selfplay.preflight.run import check_machine
from tests.helpers.engine_claims import *  # noqa: F403

PROMPT = list(range(10, 50))
GREEDY, SAMPLED = Sampling(0.0, ()), Sampling(1.0, ())


def game(prompt: list[int]) -> GameCoroutine:
    """Four turns of one seat; between them the game adds tokens."""

    async def play(generate: Generate) -> list[int]:
        ids = list(prompt)
        for num in range(4):
            completion = await generate(Request(list(ids), 20 + num, num))
            ids += [*completion.ids, 7, 8]
        return ids

    return play


def test_greedy_games_are_the_hf_engine_s_id_for_id(engine: VLLMEngine, policy: Any) -> None:
    """In fp32; eight prompts of different lengths, each played four times."""
    games = [game([*range(10 + n, 50 + 2 * n)]) for n in range(8) for _ in range(4)]
    played = engine.run_games(games, GREEDY)
    assert played == HFEngine(policy).run_games(games, GREEDY)
    assert len({tuple(ids) for ids in played}) == 8


def test_a_seed_gives_the_same_tokens_in_another_batch(engine: VLLMEngine, policy: Any) -> None:
    [alone] = engine.generate_batch([Request(PROMPT, 30, 2**62 + 5)], SAMPLED)
    seeds = [1, 2, 2**62 + 5, 3]
    among = engine.generate_batch([Request(PROMPT, 30, seed) for seed in seeds], SAMPLED)
    assert among[2].ids == alone.ids
    assert len({tuple(each.ids) for each in among}) == 4


def test_a_prompt_s_blocks_are_computed_once_and_not_after_a_push(
    engine: VLLMEngine, policy: Any
) -> None:
    """Prompts of 300 tokens: two whole blocks of 128. The policy's fixture has just pushed."""
    prompt = [10 + i % 280 for i in range(300)]

    def cached() -> int:
        before = engine.num_cached_tokens
        engine.generate_batch([Request(prompt, 2, 0)], GREEDY)
        return engine.num_cached_tokens - before

    assert [cached(), cached()] == [0, 256]
    engine.load(Weights(policy, engine.dtype), engine.version + 1)  # noqa: F405
    assert cached() == 0


def test_scoring_returns_while_the_engine_works_and_answers_wait(
    engine: VLLMEngine, policy: Any
) -> None:
    """Longer than the time-out: the engine answered meanwhile, and is not taken for silent."""
    patience_s, engine._timeout_s = engine._timeout_s, 1.0
    try:
        answers = engine.score([PROMPT, PROMPT[:5]])
        assert engine.llm.output_processor.get_num_unfinished_requests() == 2
        time.sleep(1.2)
        assert [len(each) for each in answers()] == [39, 4]
    finally:
        engine._timeout_s = patience_s


def test_a_request_that_is_given_up_ends_no_other(engine: VLLMEngine, policy: Any) -> None:
    async def many(generate: Any) -> int:
        asked = [asyncio.ensure_future(generate(Request(PROMPT, 60, n))) for n in range(12)]
        while engine.llm.output_processor.get_num_unfinished_requests() < 12:
            await asyncio.sleep(0)
        asked[0].cancel()
        return len([await one for one in asked[1:]])

    assert engine.run_games([many], SAMPLED) == [11]
    assert engine.llm.output_processor.get_num_unfinished_requests() == 0


def test_an_argument_that_vllm_lacks_is_refused_before_the_run() -> None:
    """Not after the warm start, when the engine gets it."""
    with pytest.raises(SettingsError, match="got enforce_eagr; nearest is enforce_eager"):
        check_machine("cpu", VLLMOptions(kind="vllm", server_args={"enforce_eagr": True}))
    check_machine("cpu", VLLMOptions(kind="vllm", server_args={"enforce_eager": True}))
