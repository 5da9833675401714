"""What the engines of two policies must do, of other sizes and vocabularies: each answers in the
games of one rollout with its own weights, and fails, starts again and takes weights alone.

Tests that each engine's set imports; its `test_policies.py` has the fixture `kind`.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import selfplay
from selfplay.config import ParallelConfig
from selfplay.engines.base import Completion, Engine, Generate, Request, Sampling
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
class Kind:
    """A kind of engine: its tests' engines, and what they look at of one."""

    start: Callable[[str], Any]  # of a folder with weights
    process: Callable[[Any], int]  # the pid of the process that generates
    children: Callable[[Any], set[int]]  # the pids of all its processes
    num_turns: Callable[[Any], int]  # how many it was asked for
    be_patient: Callable[[Any, float], None]  # set the seconds of silence that end a call
    settings: dict[str, Any]  # of a run
    warm: tuple[str, ...]  # settings of the run's model
    heads: Callable[[int], dict[str, Any]]  # of a model with this hidden size


@dataclass(frozen=True)
class Policy:
    """A policy whose engine has the folder's weights or, after `push`, those of `model`."""

    engine: Engine
    model: PreTrainedModel
    supervised: SupervisedPolicy


@pytest.fixture(scope="module")
def pair(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Policy]]:
    """Two policies; the user's engine runs the games. Both have other weights than their
    folders."""
    found: dict[str, Policy] = {}
    for name, given in SHAPES.items():
        shape = given | kind.heads(given.get("hidden_size", tiny.SHAPE["hidden_size"]))
        engine = kind.start(tiny.save(tmp_path_factory.mktemp(name), **shape))
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


def assert_own_weights(pair: dict[str, Policy], played: list[list[Turn]]) -> None:
    for name, ids, completion in (turn for turns in played for turn in turns):
        assert tiny.worst_mismatch(pair[name].model, ids, completion) < 1e-4, name


def test_each_seat_is_answered_by_its_policy_with_its_weights_and_stop_ids(
    kind: Kind, pair: dict[str, Policy]
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
    assert all(kind.num_turns(policy.engine) >= 36 for policy in pair.values())


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


KILLED = r"the engine (died during generation|failed): pid \d+ with exit code -9"
FAULTS = [
    ("agent", signal.SIGKILL, KILLED),
    ("agent", signal.SIGSTOP, r"no answer within 3 s during generation: \d requests wait"),
    ("user", signal.SIGKILL, KILLED),
]


@pytest.mark.parametrize(("name", "number", "told"), FAULTS)
def test_an_engine_that_fails_in_games_is_started_again_alone_and_they_end_with_pushed_weights(
    kind: Kind,
    pair: dict[str, Policy],
    name: str,
    number: signal.Signals,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process that generates is killed or stopped; the other policy's go on."""
    (other,) = {"user", "agent"} - {name}
    before = {each: kind.children(policy.engine) for each, policy in pair.items()}
    attempts = count()
    kind.be_patient(pair[name].engine, 3.0)

    async def failing(generate: Generate) -> Any:
        turns = await game(generate, turns=2)
        if next(attempts) == 0:
            os.kill(kind.process(pair[name].engine), number)
        return [*turns, *await game(generate, turns=4)]

    played = play(pair, [failing, game, partial(game, first=1, turns=40, num_new=4)])
    assert_own_weights(pair, played)
    assert next(attempts) == 2
    said = capsys.readouterr().err
    assert f"restarting the engine of {name}\n" in said
    assert re.search(told, said), said
    assert (
        kind.children(pair[other].engine) == before[other]
        and not kind.children(pair[name].engine) & before[name]
    )
    restarts = {each: policy.supervised.take_num_restarts() for each, policy in pair.items()}
    assert restarts == {name: 1, other: 0}


def test_a_run_of_two_policies_restarts_the_engine_that_died_and_trains_both(
    kind: Kind, tmp_path: Path
) -> None:
    """The second one's engine is killed before the second step's games."""
    begin_warm(folder := tmp_path / "run", *kind.warm)
    more = {
        **kind.settings,
        "policies": {"one": {"seats": [0]}, "other": {"seats": [1], "optim": {"lr": 3e-4}}},
        "out": str(folder),
    }
    with selfplay.start(write_tiny(folder), more, steps=2) as run:
        engines = {policy.name: policy.engine.engine for policy in run.parts.policies}
        run.step()
        before = kind.children(engines["one"])
        os.kill(kind.process(engines["other"]), signal.SIGKILL)
        run.step()
        assert kind.children(engines["one"]) == before
        run.finish()
    for number, line in enumerate(run.metrics):
        assert line["num_engine_restarts"] == number
        for name in engines:
            assert line[f"mismatch_mean/{name}"] < 1e-4 > line[f"sync_check_mismatch/{name}"]
    assert not same_weights(folder / "final" / "one", folder / "final" / "other")
