"""The engines of two policies on the real SGLang: the claims of `helpers/pair_claims.py`, and one
event loop for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import selfplay
from selfplay.engines.base import Generate, Request, Sampling
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.partners.router import EngineRouter, Live
from tests.helpers.casts import trained
from tests.helpers.pair_claims import *  # noqa: F403
from tests.helpers.pair_claims import (
    MODELS,
    PROMPT,
    VERSIONS,
    Kind,
    Policy,
    assert_own_weights,
    game,
    play,
)
from tests.sglang import tiny


def be_patient(engine: Any, seconds: float) -> None:
    engine._loop.timeout_s = seconds


@pytest.fixture(scope="module")
def kind() -> Iterator[Kind]:
    alone = pytest.MonkeyPatch()
    alone.setattr(EngineLoop, "of_policies", [])  # without the engine that other files share
    yield Kind(
        start=lambda folder: tiny.start(folder, sessions=tiny.ENGINE["fast"]),
        process=tiny.scheduler,
        children=lambda engine: {process.pid for process in engine._loop.children},
        num_turns=lambda engine: engine.counters.num_turns,
        be_patient=be_patient,
        settings={"engine.kind": "sglang", "engine.max_cache_tokens": 16384},
        warm=(),
        heads=lambda hidden_size: {},
    )
    alone.undo()


@pytest.mark.parametrize("slow", ["user", "agent"])
def test_a_slow_game_holds_up_no_other_at_either_engine(pair: dict[str, Policy], slow: str) -> None:
    """In waves a short game would wait for the long turn."""
    ended: list[str] = []

    async def long(generate: Generate) -> None:
        await generate(Request(PROMPT, 450, 0, model=MODELS[slow]))
        ended.append("long")

    async def short(generate: Generate) -> None:
        await game(generate, turns=4, num_new=2)
        ended.append("short")

    live = {"agent": Live(pair["agent"].engine, ())}
    endless = EngineRouter(pair["user"].engine, frozen={}, endpoints={}, live=live)
    endless.run_games([long, short, short], Sampling(1.0, ()))
    assert ended == ["short", "short", "long"]


def test_the_engines_share_an_event_loop_that_ends_with_the_last_of_them(
    pair: dict[str, Policy],
) -> None:
    """The one that started first, whose event loop it was, is closed; then it starts again."""
    agent, user = pair["agent"].engine, pair["user"].engine
    loop = user._loop._loop
    assert agent._loop._loop is loop
    with closing(agent):
        pass
    [answer] = user.generate_batch([Request(PROMPT, 8, 0)], Sampling(1.0, ()))
    assert tiny.worst_mismatch(pair["user"].model, list(PROMPT), answer) < 1e-4
    with pytest.raises(RuntimeError, match="the engine is gone"):
        agent.generate_batch([Request(PROMPT, 8, 0)], Sampling(1.0, ()))
    agent.restart()
    assert agent._loop._loop is loop
    assert_own_weights_after_push(pair)
    user.close()
    agent.close()
    assert loop.is_closed()


def assert_own_weights_after_push(pair: dict[str, Policy]) -> None:
    pair["agent"].supervised.push(VERSIONS["agent"])
    assert_own_weights(pair, play(pair, [game]))


def test_a_cast_is_evaluated_by_an_engine_of_each_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedily each seat is answered by its own policy's weights, as in transformers."""
    run, games = trained(), []
    capsys.readouterr()
    for own in ({"engine.kind": "sglang", "engine.max_cache_tokens": 16384}, {}):
        out = tmp_path / f"{len(own)}"
        done = selfplay.evaluate(run, own, num=6, temperature=0.0, out=out)
        said = capsys.readouterr().out
        assert said.count("engine up") == len(own) and ("additional weights" in said) == (not own)
        games.append(done.rows["policy, greedy"]["games"])
    assert games[0] == games[1]
