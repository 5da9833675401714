"""The engines of two policies, of other sizes and vocabularies: each answers in the games of one
rollout with its own weights, and fails, starts again and takes weights alone."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import selfplay
from selfplay.config import ParallelConfig
from selfplay.engines.base import Completion, Generate, Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.event_loop import EngineLoop
from selfplay.engines.weights import Weights
from selfplay.partners.router import EngineRouter, Live
from selfplay.rollout.driver import _check_completion
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.supervised import SupervisedPolicy
from tests.helpers.small_updates import learner_of
from tests.helpers.tiny_run import begin_warm, same_weights, write_tiny
from tests.sglang import tiny

SHAPES: dict[str, dict[str, Any]] = {  # no token ends a turn but those of STOPS
    "agent": {"vocab_size": 211, "hidden_size": 32, "eos_token_id": None},
    "user": {"eos_token_id": None},
}
PROMPT = tuple(range(100, 140))
STOPS = {"user": tuple(range(20, 50)), "agent": tuple(range(60, 90))}
VERSIONS = {"user": 4, "agent": 9}
MODELS = {"user": "", "agent": "agent"}  # of their requests
PUSHED = {MODELS[name]: version for name, version in VERSIONS.items()}
Turn = tuple[str, list[int], Completion]


@dataclass(frozen=True)
class Policy:
    """A policy whose engine has the folder's weights or, after `push`, those of `model`."""

    engine: SGLangEngine
    model: PreTrainedModel
    supervised: SupervisedPolicy


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Policy]]:
    """Two policies; the user's engine runs the games. Both have other weights than their
    folders."""
    alone = pytest.MonkeyPatch()
    alone.setattr(EngineLoop, "of_policies", [])  # without the engine that other files share
    found: dict[str, Policy] = {}
    for name, shape in SHAPES.items():
        folder = tiny.save(tmp_path_factory.mktemp(name), **shape)
        engine = tiny.start(folder, sessions=tiny.ENGINE["fast"])
        model = tiny.moved(tiny.build(**shape), seed=5)
        learner = learner_of(model)
        others = {other: Live(found[other].engine, STOPS[other]) for other in found}
        supervised = SupervisedPolicy(
            learner,
            engine,
            Offload(learner, ParallelConfig()),
            runner=EngineRouter(engine, frozen={}, endpoints={}, live=others),
            name=name,
            beside=[policy.supervised for policy in found.values()],
        )
        found[name] = Policy(engine, model, supervised)
    for name, policy in found.items():
        policy.supervised.push(VERSIONS[name])
    yield found
    for policy in found.values():
        policy.engine.close()
    alone.undo()


async def game(generate: Generate, *, first: int = 0, turns: int = 6, num_new: int = 8) -> Any:
    """Seats in turn, each with a text of its own: its prompts and completions."""
    texts, played = {"user": list(PROMPT), "agent": list(PROMPT)}, list[Turn]()
    for number in range(turns):
        name = ("user", "agent")[(first + number) % 2]
        ids = texts[name]
        completion = await generate(Request(tuple(ids), num_new, number, model=MODELS[name]))
        _check_completion(Request(ids, num_new, 0, model=MODELS[name]), completion, PUSHED)
        played.append((name, ids, completion))
        texts[name] = [*ids, *completion.ids, 7, 8]
    return played


def play(pair: dict[str, Policy], games: Any) -> Any:
    """Play as a step does, with the user's stop ids."""
    return pair["user"].supervised.run_games(games, Sampling(1.0, STOPS["user"]))


def children_of(engine: Any) -> set[int]:
    return {process.pid for process in engine._loop.children}


def assert_own_weights(pair: dict[str, Policy], played: list[list[Turn]]) -> None:
    for name, ids, completion in (turn for turns in played for turn in turns):
        assert tiny.worst_mismatch(pair[name].model, ids, completion) < 1e-4, name


def test_each_seat_is_answered_by_its_policy_with_its_weights_and_stop_ids(
    pair: dict[str, Policy],
) -> None:
    played = play(pair, [partial(game, first=number % 2) for number in range(12)])
    assert_own_weights(pair, played)
    completions = {
        name: [c for turns in played for who, _, c in turns if who == name] for name in pair
    }
    for name, other in (("user", "agent"), ("agent", "user")):
        own = completions[name]
        assert len(own) == 36 and {c.version for c in own} == {VERSIONS[name]}
        for completion in own:
            *before, last = completion.ids
            assert not set(before) & set(STOPS[name])
            assert (last in STOPS[name]) == (completion.finish == "stop")
        assert any(set(completion.ids) & set(STOPS[other]) for completion in own)
    assert pair["user"].engine.counters.num_turns >= 36 <= pair["agent"].engine.counters.num_turns


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


def test_each_engine_takes_and_compares_its_own_weights_and_scores_beside_the_other(
    pair: dict[str, Policy],
) -> None:
    for policy in pair.values():
        others = tiny.moved(policy.model, seed=8)
        assert policy.engine.compare(Weights(policy.model, policy.engine.dtype)).num_different == 0
        assert policy.engine.compare(Weights(others, policy.engine.dtype)).num_different > 0
        policy.supervised.sleep()
    waits = {name: policy.engine.score([PROMPT]) for name, policy in pair.items()}
    for name, wait in reversed(waits.items()):
        wanted = tiny.score(pair[name].model, list(PROMPT[:1]), list(PROMPT[1:]), 1.0)
        assert wait()[0] == pytest.approx(wanted, abs=1e-4)
    for name, policy in pair.items():
        policy.supervised.push(VERSIONS[name])


KILLED = r"the engine died during generation: pid \d+ with exit code -9"
FAULTS = [
    ("agent", signal.SIGKILL, KILLED),
    ("agent", signal.SIGSTOP, r"no answer within 3 s during generation: \d requests wait"),
    ("user", signal.SIGKILL, KILLED),
]


@pytest.mark.parametrize(("name", "number", "told"), FAULTS)
def test_an_engine_that_fails_in_games_is_started_again_alone_and_they_end_with_pushed_weights(
    pair: dict[str, Policy],
    name: str,
    number: signal.Signals,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One policy's scheduler is killed or stopped; the other's processes go on."""
    (other,) = {"user", "agent"} - {name}
    before = {each: children_of(policy.engine) for each, policy in pair.items()}
    attempts = count()
    pair[name].engine._loop.timeout_s = 3.0

    async def failing(generate: Generate) -> Any:
        turns = await game(generate, turns=2)
        if next(attempts) == 0:
            os.kill(tiny.scheduler(pair[name].engine), number)
        return [*turns, *await game(generate, turns=4)]

    played = play(pair, [failing, game, partial(game, first=1, turns=40, num_new=4)])
    assert_own_weights(pair, played)
    assert next(attempts) == 2
    said = capsys.readouterr().err
    assert f"restarting the engine of {name}\n" in said
    assert re.search(told, said), said
    assert (
        children_of(pair[other].engine) == before[other]
        and not children_of(pair[name].engine) & before[name]
    )
    restarts = {each: policy.supervised.take_num_restarts() for each, policy in pair.items()}
    assert restarts == {name: 1, other: 0}


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


def test_a_run_of_two_policies_restarts_the_engine_that_died_and_trains_both(
    tmp_path: Path,
) -> None:
    """The second one's scheduler is killed before the second step's games."""
    begin_warm(folder := tmp_path / "run")
    more = {
        "engine.kind": "sglang",
        "engine.max_cache_tokens": 16384,
        "policies": {"one": {"seats": [0]}, "other": {"seats": [1], "optim": {"lr": 3e-4}}},
        "out": str(folder),
    }
    with selfplay.start(write_tiny(folder), more, steps=2) as run:
        engines = {policy.name: policy.engine.engine for policy in run.parts.policies}
        run.step()
        before = children_of(engines["one"])
        os.kill(tiny.scheduler(engines["other"]), signal.SIGKILL)
        run.step()
        assert children_of(engines["one"]) == before
        run.finish()
    for number, line in enumerate(run.metrics):
        assert line["num_engine_restarts"] == number
        for name in engines:
            assert line[f"mismatch_mean/{name}"] < 1e-4 > line[f"sync_check_mismatch/{name}"]
    assert not same_weights(folder / "final" / "one", folder / "final" / "other")
