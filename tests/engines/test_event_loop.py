"""When the engine's event loop takes an engine for dead."""

import asyncio
import atexit
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from selfplay.engines.sglang.event_loop import EngineLoop


@pytest.fixture
def engine_loop() -> Iterator[EngineLoop]:
    """The loop of an engine without processes; its time-out is 0.5 s."""
    loop = asyncio.new_event_loop()
    manager = SimpleNamespace(auto_create_handle_loop=lambda: None, rid_to_state={})
    engine = SimpleNamespace(loop=loop, tokenizer_manager=manager)
    started: Any = SimpleNamespace(engines=(engine,), processes=())
    signals: Any = SimpleNamespace(take=lambda _: None, restore=lambda: None)
    made = EngineLoop(started, signals, timeout_s=0.5)
    atexit.unregister(made.close)
    yield made
    loop.close()


async def due(engine_loop: EngineLoop, seconds: float) -> str:
    with engine_loop.pending_answer():
        await asyncio.sleep(seconds)
    return "scores"


def test_an_answer_that_waits_while_the_trainer_is_busy_is_taken(engine_loop: EngineLoop) -> None:
    """The trainer computes for longer than the time-out; the engine answered meanwhile."""
    wait = engine_loop.begin(due(engine_loop, 0.05), what="scoring")
    time.sleep(0.6)
    assert wait() == "scores"
