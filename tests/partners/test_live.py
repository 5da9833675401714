"""Two policies in training: each answers in the same games with its own weights, and an engine that
fails is started again alone."""

import copy
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.config import ParallelConfig
from selfplay.engines.base import Completion, Generate, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.errors import EngineFault, EngineLost, EnginesFailed
from selfplay.partners.router import EngineRouter, Live
from selfplay.rollout.driver import _Counting
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.supervised import MAX_FAILURES, SupervisedPolicy
from tests.helpers.faulty_engine import DEATH, Faults, FaultyHF
from tests.helpers.small_updates import learner_of
from tests.helpers.tiny_run import tiny_model

SIZES = {"user": 300, "agent": 200}  # of their vocabularies
STOPS = {"user": tuple(range(20, 50)), "agent": tuple(range(60, 90))}
VERSIONS = {"user": 3, "agent": 8}
MODELS = {"user": "", "agent": "agent"}  # of their requests
PUSHED = {MODELS[name]: version for name, version in VERSIONS.items()}
PROMPT = tuple(range(100, 110))
Turn = tuple[str, list[int], Completion]


class Mortal(FaultyHF):
    """A copy of a model that fails by its own plan, and starts again with its first weights. It
    notes what happens to it in `story`."""

    def __init__(self, model: PreTrainedModel, name: str, story: list[str]) -> None:
        super().__init__(copy.deepcopy(model))
        self.first, self.faults = copy.deepcopy(model.state_dict()), Faults()
        self.name, self.story, self.waves = name, story, list[int]()

    def generate_batch(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.waves.append(len(requests))
        return super().generate_batch(requests, sampling)

    @property
    def lost(self) -> bool:
        return self.faults.dead is not None

    def sleep(self) -> None:
        self.story.append(f"sleep {self.name}")

    def load(self, *words: Any) -> None:
        self.story.append(f"push {self.name}")
        super().load(*words)

    def restart(self) -> None:
        self.story.append(f"restart {self.name}")
        self.model.load_state_dict(self.first)
        self.version = 0
        super().restart()

    def close(self) -> None:
        self.story.append(f"close {self.name}")


class Pair:
    """Two policies with the engines of `story`; the user's runs the games."""

    def __init__(self) -> None:
        self.story = list[str]()
        self.models = {n: tiny_model(seed=7, vocab_size=size) for n, size in SIZES.items()}
        starts = {n: tiny_model(seed=1, vocab_size=size) for n, size in SIZES.items()}
        self.engines = {n: Mortal(start, n, self.story) for n, start in starts.items()}
        self.agent, self.user = (self.supervised(name) for name in ("agent", "user"))
        live = {"agent": Live(self.engines["agent"], STOPS["agent"])}
        own = self.engines["user"]
        self.user._runner = EngineRouter(own, frozen={}, endpoints={}, live=live)
        self.user.beside = [self.agent]
        for each in (self.user, self.agent):
            each.push(VERSIONS[each.name])
        self.story.clear()

    def supervised(self, name: str) -> SupervisedPolicy:
        learner = learner_of(self.models[name])
        offload = Offload(learner, ParallelConfig())
        return SupervisedPolicy(learner, self.engines[name], offload, name=name)

    def play(self, num: int = 6, *, turns: int = 6) -> list[list[Turn]]:
        games = [partial(game, first=number % 2, turns=turns) for number in range(num)]
        return self.user.run_games(games, Sampling(1.0, STOPS["user"]))

    def fail(self, name: str, plan: dict[tuple[str, int], str]) -> None:
        self.engines[name].faults = Faults(plan)


async def game(generate: Generate, *, first: int, turns: int) -> list[Turn]:
    """Seats in turn, each with a text of its own: its prompts and completions."""
    texts, played = {"user": [*PROMPT], "agent": [*PROMPT]}, list[Turn]()
    checked = _Counting(generate, PUSHED)
    for number in range(turns):
        name = ("user", "agent")[(first + number) % 2]
        request = Request(tuple(texts[name]), 8, 100 * first + number, model=MODELS[name])
        completion = await checked.generate(request)
        played.append((name, texts[name], completion))
        texts[name] = [*texts[name], *completion.ids, 7]
    return played


@pytest.fixture
def pair() -> Pair:
    return Pair()


def assert_own(pair: Pair, played: list[list[Turn]]) -> None:
    """Every completion has the log-probs of its policy's pushed weights, and their version."""
    for name, prompt, completion in chain(*played):
        assert completion.version == VERSIONS[name]
        ids = torch.tensor([[*prompt, *completion.ids]])
        logits_TV = pair.models[name](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logits_TV.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(own.tolist(), abs=1e-4)


def test_each_policy_answers_its_seats_with_its_own_weights_and_stop_ids(pair: Pair) -> None:
    played = pair.play(16)
    assert_own(pair, played)
    for name, other in (("user", "agent"), ("agent", "user")):
        completions = [c for who, _, c in chain(*played) if who == name]
        for completion in completions:
            assert not set(completion.ids[:-1]) & set(STOPS[name])
            assert (completion.ids[-1] in STOPS[name]) == (completion.finish == "stop")
        assert any(set(completion.ids) & set(STOPS[other]) for completion in completions)


def test_waves_hold_all_games_that_wait_and_a_rollout_repeats_bit_for_bit(pair: Pair) -> None:
    """Three games begin with each seat: the engine that runs the games waits until the other's have
    come back, so that its wave has all six."""
    played = pair.play()
    assert pair.engines["agent"].waves == [3, 6, 6, 3]
    assert pair.engines["user"].waves == [6, 6, 6]
    assert pair.play() == played


def test_a_custom_engine_answers_by_its_batches_in_a_thread() -> None:
    """Also if its `generate_batch` runs an event loop."""

    class Elsewhere(HFEngine):
        in_trainer = False

        def generate_batch(self, requests: Any, sampling: Any) -> list[Completion]:
            answer = partial(super().generate_batch, sampling=sampling)
            return HFEngine.run_games(
                self, [partial(_one, request, answer) for request in requests], sampling
            )

    async def _one(request: Request, answer: Any, _generate: Generate) -> Completion:
        return answer([request])[0]

    user, agent = (tiny_model(seed=seed, vocab_size=300) for seed in (1, 2))
    live = {"agent": Live(Elsewhere(agent), ())}
    router = EngineRouter(HFEngine(user), frozen={}, endpoints={}, live=live)

    async def both(generate: Generate) -> list[Completion]:
        return [await generate(Request(PROMPT, 8, 3, model=name)) for name in ("", "agent")]

    ((one, other),) = router.run_games([both], Sampling(0.0, ()))
    for model, completion in ((user, one), (agent, other)):
        (alone,) = HFEngine(model).generate_batch([Request(PROMPT, 8, 3)], Sampling(0.0, ()))
        assert completion.ids == alone.ids


@pytest.mark.parametrize("name", ["user", "agent"])
def test_an_engine_that_dies_in_games_is_started_again_alone(
    pair: Pair, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then both sleep, and each gets its own policy's last weights."""
    pair.fail(name, {("generate", 2): "dies"})
    assert_own(pair, pair.play())
    slept = ["sleep user", "sleep agent"]
    pushed = ["push user", "push agent"]
    assert pair.story == [f"restart {name}", *slept, *pushed]
    assert f"{DEATH}; restarting the engine of {name}\n" in capsys.readouterr().err
    restarts = {each.name: each.take_num_restarts() for each in (pair.user, pair.agent)}
    assert restarts == {"user": name == "user", "agent": name == "agent"}


@pytest.mark.parametrize("name", ["user", "agent"])
def test_an_engine_with_an_invalid_completion_is_started_again_alone(pair: Pair, name: str) -> None:
    pair.fail(name, {("generate", 2): "nan"})
    assert_own(pair, pair.play())
    assert pair.story[:2] == [f"restart {name}", "sleep user"]
    restarts = {each.name: each.take_num_restarts() for each in (pair.user, pair.agent)}
    assert restarts == {"user": name == "user", "agent": name == "agent"}


def test_both_are_started_again_if_nobody_knows_which_one_failed(pair: Pair) -> None:
    pair.user._restart(EnginesFailed({0: "a reply cannot be read"}), 1, pair.user.beside)
    assert pair.story[:2] == ["restart user", "restart agent"]


def test_a_push_restarts_its_own_engine_only(pair: Pair) -> None:
    pair.fail("user", {("push", 1): "dies"})
    pair.user.sleep()
    assert pair.story == ["sleep user", "sleep agent"]
    pair.user.push(VERSIONS["user"])
    assert pair.story[2:] == ["push user", "restart user", "sleep user", "push user"]
    assert pair.agent.take_num_restarts() == 0


def test_the_third_failure_closes_the_lost_engine_and_leaves_the_other_asleep(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.fail("agent", {("generate", number): "dies" for number in range(1, 9)})
    with pytest.raises(EngineLost, match=f"failed {MAX_FAILURES} times in a row.*{DEATH}"):
        pair.play()
    assert pair.story[-3:] == ["close agent", "sleep user", "sleep agent"]
    assert "restart user" not in pair.story
    assert pair.agent.take_num_restarts() == MAX_FAILURES - 1
    assert len(re.findall("engine failure", capsys.readouterr().err)) == MAX_FAILURES


def test_an_old_version_of_either_policy_is_a_fault(pair: Pair) -> None:
    pair.engines["agent"].version = 0  # as of an engine that has its folder's weights
    with pytest.raises(EngineFault, match="engine of agent must use the weights of step 8, uses"):
        pair.user._runner.run_games([partial(game, first=1, turns=1)], Sampling(1.0, ()))
