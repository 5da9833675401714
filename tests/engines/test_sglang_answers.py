"""What the SGLang engine makes of an answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.line import Answer

STOP = 7


@pytest.mark.parametrize(
    ("ids", "told", "finish"),
    [
        pytest.param([5, STOP], "stop", "stop", id="stopped below its limit"),
        pytest.param([5, 6, STOP], "length", "stop", id="the stop token is the last that fits"),
        pytest.param([5, 6, 6], "length", "length", id="cut off"),
        pytest.param([], "length", "length", id="nothing"),
    ],
)
def test_a_turn_that_ends_with_its_stop_token_is_complete(
    ids: list[int], told: str, finish: str
) -> None:
    """SGLang compares the length first and calls a stop token at the limit `length`; the hf engine
    does not, and a game refuses a move that was cut off."""

    async def ask(*_: Any, **__: Any) -> Answer:
        return Answer(ids, [-1.0] * len(ids), [], told, num_prompt=2, num_cached=0)

    engine = object.__new__(SGLangEngine)
    engine.deterministic, engine.version = False, 0
    asker: Any = SimpleNamespace(ask=ask)
    answered = asyncio.run(engine._answer(asker, Request([1, 2], 3, 0), Sampling(1.0, (STOP,))))
    assert (answered.ids, answered.finish) == (ids, finish)
