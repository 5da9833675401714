"""The settings that `auto` chooses leave the sampled distribution as it is: two processes, bursts
and sessions here, prefill graphs in tests/gpu/test_engine_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from selfplay.engines.base import GameCoroutine, Generate, Request, Sampling
from selfplay.engines.options import SGLangOptions
from selfplay.engines.sglang.choose import Load, choose
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.errors import SettingsError
from selfplay.preflight.run import check_machine
from tests.helpers.rare_tokens import rare_draws
from tests.sglang import tiny

pytestmark = pytest.mark.fast_engine

GREEDY = Sampling(0.0, ())
PROMPTS = [list(range(10 + n, 50 + n)) for n in range(8)]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """As for a 0.5B on a GPU, where the turns are long at first sight."""
    load = Load(
        num_weights=494_000_000, games=512, turn_tokens=64.0, continues=True, cores=16, gpu=True
    )
    engine = choose(SGLangOptions(kind="sglang", **tiny.ENGINE), load)
    assert (engine.processes, engine.burst_share, engine.sessions) == (2, 0.25, True)
    names = ("processes", "burst_share", "sessions", "adapts")
    settings = {name: getattr(engine, name) for name in names}
    started = tiny.start(tiny.save(tmp_path_factory.mktemp("model")), **settings)
    yield started
    started.close()


def test_an_argument_that_sglang_lacks_is_refused_before_the_run() -> None:
    """Not after the warm start, when the engine gets it."""
    with pytest.raises(SettingsError, match="got log_levl; nearest is log_level"):
        check_machine("cpu", SGLangOptions(kind="sglang", server_args={"log_levl": "info"}))
    check_machine("cpu", SGLangOptions(kind="sglang", server_args={"log_level": "info"}))


def game(prompt: list[int]) -> GameCoroutine:
    """Four greedy turns of one seat."""

    async def play(generate: Generate) -> list[int]:
        ids = list(prompt)
        for num in range(4):
            completion = await generate(Request(list(ids), 4 + num, 0))
            ids += [*completion.ids, 7, 8]
        return ids

    return play


def test_greedy_games_are_the_same_and_bursts_follow_their_turns(
    chosen: SGLangEngine, engine: SGLangEngine, policy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other engine is one process that sends each request at once. 32 games of 4 turns of 4 to
    7 tokens are short turns: bursts of half of a process's requests, said once."""
    games = [game(prompt) for prompt in PROMPTS for _ in range(4)]
    plain = engine.run_games(games, GREEDY)
    assert chosen.run_games(games, GREEDY) == plain
    assert len({tuple(ids) for ids in plain}) == len(PROMPTS)
    assert [bursts.share for bursts in chosen.bursts] == [0.5, 0.5]
    assert chosen.run_games(games, GREEDY) == plain
    said = [line for line in capsys.readouterr().out.splitlines() if "burst_share" in line]
    assert said == ["engine: turns have 5 tokens, burst_share is 0.5"]


def test_rare_tokens_are_drawn_as_often_as_their_probabilities_say(chosen: SGLangEngine) -> None:
    requests = [Request(PROMPTS[0][:n], 200, n) for n in range(1, 33)]
    expected, deviation, count = rare_draws(tiny.build(), chosen, requests, 0.1, nats=8.0)
    assert expected > 30
    assert abs(count - expected) < 4.5 * deviation
