"""An engine that starts while the teachers play, sleeps while they are imitated, and then has the
imitated weights."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.chat.rendering import make_rendering
from selfplay.config import load_config
from selfplay.config.plugins import PLUGINS
from selfplay.distributed import init_world
from selfplay.engines.base import Engine, Request, Sampling
from selfplay.errors import EngineLost
from selfplay.learner.learner import make_learner
from selfplay.learner.update import optimizer_step
from selfplay.setup import make_tokenizer
from selfplay.warm_start.beside import EngineBeside, fits_beside
from selfplay.warm_start.imitation import (
    first_folder,
    first_weights,
    progress_folder,
    rehearse,
)
from selfplay.weight_sync.supervised import Supervised
from tests.helpers.faulty_engine import Faults, FaultyHF, Unstarted
from tests.helpers.interrupted import stopped
from tests.helpers.tiny_run import same_weights
from tests.sglang import tiny

SHAPE = "model.scratch={tokenizer_games: 20, width: 32, layers: 2, heads: 2, kv_heads: 2}"
WORDS = (
    SHAPE,
    "rollout.max_game_tokens=1024",
    "game={options: {size: 2, scale: false, brief: true}}",
    "warm_start={num_games: 200, keep: all, batch_size: 40, epochs: 1}",
    "threads=1",
)
PROMPT, NUM = [5, 6, 7, 8], 12


def warm_up(
    run: Path, *words: str, beside: bool = True, check: Any = lambda engine: None
) -> tuple[Path, Engine | None]:
    """The first weights of a run of 200 imitated games in four chunks and ten steps, and the engine
    that started beside it, if any did."""
    run.mkdir(exist_ok=True)
    config, world = load_config(None, [*WORDS, f"out={run}", *words]), init_world(device="cpu")
    tokenizer = make_tokenizer(config, run, world)
    rendering = make_rendering(tokenizer, template_kwargs={})
    with ExitStack() as cleanup:
        engine = EngineBeside(config, world, cleanup, check) if beside else None
        return (
            first_weights(config, run, tokenizer, rendering, world, engine=engine),
            None if engine is None else engine.engine,
        )


def answers_as(folder: Path, sampled: list[Any]) -> bool:
    """Whether the log-probs of the sampled tokens are those of the model in this folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (completion,) = sampled
    assert len(completion.ids) == NUM
    return tiny.worst_mismatch(model, PROMPT, completion) < 1e-4


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first weights without an engine."""
    return warm_up(tmp_path_factory.mktemp("alone") / "run", beside=False)[0]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Of the run's engine, a copy of the model that fails by plan."""
    built_in: Any = PLUGINS["engine.kind"].built_in
    monkeypatch.setitem(built_in, "hf", "tests.helpers.faulty_engine:FaultyHF")
    yield FaultyHF.faults
    FaultyHF.faults = Faults()


@pytest.mark.parametrize("fails", [(), ("wake", 1), ("push", 1), ("generate", 1)])
def test_it_answers_with_the_imitated_weights_also_after_a_fault(
    fails: Any, alone: Path, faults: Faults, tmp_path: Path
) -> None:
    """It starts with the random ones. A restart in the middle loses the pushed ones. The
    imitation has the bits that it has without an engine."""
    sampled: list[Any] = []

    def check(engine: Supervised) -> None:
        request = Request(PROMPT, NUM, seed=0)
        sampled.extend(engine.generate_batch([request], Sampling(1.0, ())))

    faults.plan = {fails: "dies"} if fails else {}
    weights, engine = warm_up(tmp_path / "run", check=check)
    assert faults.num_restarts == len(faults.plan) == len(faults.happened)
    assert same_weights(weights, alone)
    assert answers_as(weights, sampled)
    assert engine is not None and not answers_as(tmp_path / "run" / "random_start", sampled)
    # Asleep at the start, and after the check; a fault in between puts it to sleep once more.
    assert faults.num["sleep"] == 2 + faults.num_restarts


def test_a_warm_start_that_goes_on_has_its_engine_and_a_finished_one_none(
    alone: Path, faults: Faults, tmp_path: Path
) -> None:
    with stopped(optimizer_step, 4), pytest.raises(KeyboardInterrupt):
        warm_up(tmp_path / "run")
    weights, engine = warm_up(tmp_path / "run")
    assert engine is not None and same_weights(weights, alone)
    assert warm_up(tmp_path / "run") == (weights, None)


def test_a_rehearsal_leaves_the_learner_as_it_was(alone: Path) -> None:
    """Weights, gradients and the optimizer's state, so the imitation after it keeps its bits."""
    config, world = load_config(None, [*WORDS]), init_world(device="cpu")
    learner = make_learner(config, alone, world, imitation="muon")
    before = [weight.detach().clone() for weight in learner.model.parameters()]
    rehearse(learner)
    for weight, was in zip(learner.model.parameters(), before, strict=True):
        assert torch.equal(weight, was) and weight.grad is None
    assert not learner.optimizer.state and not learner.model.training


@pytest.mark.slow
def test_an_engine_that_does_not_start_ends_the_run_before_all_games_are_played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two processes have at most one chunk each, and one waits; another start plays the rest."""
    built_in: Any = PLUGINS["engine.kind"].built_in
    monkeypatch.setitem(built_in, "sglang", "tests.helpers.faulty_engine:Unstarted")
    monkeypatch.setattr(Unstarted, "num_weights", classmethod(lambda cls, folder: 0))
    run = tmp_path / "run"
    with pytest.raises(EngineLost, match="does not start"):
        warm_up(run, "engine.kind=sglang", "data.processes=2", "warm_start.num_games=400")
    assert len([*progress_folder(run).glob("games_*")]) < 8
    assert not first_folder(load_config(None, [*WORDS]), run).exists()


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        (True, ["engine.kind=sglang"]),
        (True, ["engine.kind=sglang", "rollout.partners=[self,scripted:solo,pool]"]),
        (True, ["engine.kind=sglang", "model.lora.rank=4", "warm_start.lora=true"]),
        (False, ["engine.kind=sglang", "model.lora.rank=4"]),  # it trains more than an update
        (False, ["engine.kind=sglang", "rollout.partners=[self,checkpoint:/x]"]),
        (False, ["engine.kind=hf"]),
        (False, ["engine.kind=vllm"]),  # not tried on a GPU
    ],
)
def test_where_an_engine_fits_beside_the_warm_start(fits: bool, words: list[str]) -> None:
    base = ["model.path=x", "warm_start.num_games=8"]
    assert fits_beside(load_config(None, [*base, *words])) is fits
