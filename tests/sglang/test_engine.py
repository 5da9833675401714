"""`SGLangEngine` with the real engine: completions, versions of the weights, refusals."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from tests.helpers.engine_claims import *  # noqa: F403
from tests.sglang import tiny

PROMPT = list(range(10, 50))
PLAIN = Sampling(1.0, (tiny.STOP,))


@pytest.mark.fast_engine
def test_scoring_gives_the_full_softmax_s_logprobs_and_returns_at_once(
    engine: SGLangEngine, policy: Any
) -> None:
    """For each token but the first, given those before it, with or without a prefix cache."""
    texts = [PROMPT, PROMPT[:2], PROMPT[5:25]]
    engine.generate_batch([Request(PROMPT, 4, 0)], PLAIN)
    answers = engine.score(texts)
    assert len(engine._loop.managers[0].rid_to_state) == 3  # the engine has them; no call waits
    with torch.no_grad():
        logits = [policy(torch.tensor([text])).logits[0].log_softmax(-1) for text in texts]
    for text, logprobs_TV, scored in zip(texts, logits, answers(), strict=True):
        wanted = [logprobs_TV[i, token].item() for i, token in enumerate(text[1:])]
        assert scored == pytest.approx(wanted, abs=1e-4)


@pytest.mark.fast_engine
def test_an_answer_that_waits_while_the_trainer_is_busy_is_taken(
    engine: SGLangEngine, policy: Any
) -> None:
    """The trainer computes for longer than the time-out; the engine answered meanwhile."""
    patience_s, engine._loop.timeout_s = engine._loop.timeout_s, 2.0
    try:
        answers = engine.score([PROMPT])
        time.sleep(2.2)
        assert len(answers()[0]) == len(PROMPT) - 1
    finally:
        engine._loop.timeout_s = patience_s


@pytest.mark.fast_engine
def test_a_request_that_is_given_up_ends_no_other(engine: SGLangEngine, policy: Any) -> None:
    """SGLang aborts all requests whose names begin with the given one."""

    async def many(generate: Any) -> int:
        engine.counters.num_requests = 1
        asked = [asyncio.ensure_future(generate(Request(PROMPT, 60, n))) for n in range(12)]
        while len(engine._loop.managers[0].rid_to_state) < 12:
            await asyncio.sleep(0)
        asked[0].cancel()  # number 1; the last ones are 10, 11 and 12
        return len([await one for one in asked[1:]])  # an aborted one raises

    assert engine.run_games([many], Sampling(1.0, ())) == [11]
