"""The sync check: noise never fails it, however heavy its tail; other weights do, and then the
weights are pushed again or the run ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import selfplay
from selfplay.advantages.sample import Sample
from selfplay.config import LoraConfig, ParallelConfig
from selfplay.engines.hf import HFEngine
from selfplay.engines.options import ChosenEngine
from selfplay.engines.weights import Weights
from selfplay.errors import EngineDisagrees
from selfplay.learner.learner import Learner
from selfplay.learner.update import minibatches, update_policy
from selfplay.model.lora import add_adapters
from selfplay.weight_sync.offload import Offload
from selfplay.weight_sync.supervised import SupervisedPolicy, compared_names
from selfplay.weight_sync.sync_check import (
    FACTOR,
    FIRST_TURNS,
    MIN_TURNS,
    RECHECK_TURNS,
    WINDOW_TURNS,
    NoiseFloor,
    ScoredTurn,
    SyncCheck,
    turn_mismatch,
)
from tests.helpers.small_updates import config_of, learner_of, learner_with, some_samples
from tests.helpers.tiny_run import VOCAB, begin_warm, tiny_model, trainer_logprobs, write_tiny

# --- the statistic ------------------------------------------------------------------------------


def noisy_gaps(rng: np.random.Generator, num: int) -> np.ndarray:
    """Mismatches of healthy turns in bf16, like recorded ones. A turn has 12 tokens, whose noise is
    Student's t with 3 degrees of freedom and a scale of 0.01 nats for each nat of improbability;
    some turns are far less probable than others."""
    hardness = rng.choice([0.05, 0.3, 1.0, 4.0], (num, 1))
    apart = 0.01 * hardness * rng.exponential(1.0, (num, 12)) * rng.standard_t(3, (num, 12))
    return np.abs(apart).mean(1)


def test_ten_thousand_healthy_steps_are_never_suspected() -> None:
    """The first comparison leads to the second at most as often as stated. A fixed bound of 0.05
    nats, on 8 turns of 64 tokens scored without context, where every token is improbable, would
    fire in more than one step of a hundred."""
    rng, floor = np.random.default_rng(0), NoiseFloor()
    floor.add(noisy_gaps(rng, MIN_TURNS).tolist())
    num_first = num_second = 0
    for gaps in (
        noisy_gaps(rng, 10_000 * (FIRST_TURNS + RECHECK_TURNS)).reshape(10_000, -1).tolist()
    ):
        num_first += floor.suspects({0: gaps[:FIRST_TURNS]}, fewest=1)
        num_second += floor.suspects({0: gaps[FIRST_TURNS:]}, fewest=RECHECK_TURNS)
        floor.add(gaps[:FIRST_TURNS])
    rate = math.comb(FIRST_TURNS, 3) / math.comb(WINDOW_TURNS + FIRST_TURNS, 3)
    assert num_first <= 10_000 * rate + 5 * math.sqrt(10_000 * rate)
    assert num_second == 0
    old = 0.01 * rng.exponential(4.0, (10_000, 512)) * rng.standard_t(3, (10_000, 512))
    assert (np.abs(old).mean(1) > 0.05).mean() > 0.01


def test_the_stated_rate_is_that_of_exchangeable_draws() -> None:
    """Three of four above all of 32: C(4, 3) / C(36, 3) = 5.6e-4, whatever the distribution; this
    one has no mean. FACTOR only lowers the rate. Within 5 standard errors of 100,000 draws."""
    total = 100_000
    draws = np.random.default_rng(1).standard_cauchy((total, MIN_TURNS + FIRST_TURNS)).__abs__()
    above = draws[:, MIN_TURNS:] > draws[:, :MIN_TURNS].max(1, keepdims=True)
    measured = (above.sum(1) >= 3).mean()
    rate = math.comb(FIRST_TURNS, 3) / math.comb(MIN_TURNS + FIRST_TURNS, 3)
    assert abs(measured - rate) < 5 * math.sqrt(rate / total)
    farther = draws[:, MIN_TURNS:] > FACTOR * draws[:, :MIN_TURNS].max(1, keepdims=True)
    assert (farther.sum(1) >= 3).mean() < measured
    assert math.comb(RECHECK_TURNS, 12) / math.comb(MIN_TURNS + RECHECK_TURNS, 12) < 3e-8


def test_a_floor_suspects_nothing_before_it_is_known_or_after_forget() -> None:
    floor, wild = NoiseFloor(), {0: [9.0] * RECHECK_TURNS}
    floor.add([0.01] * (MIN_TURNS - 1))
    assert not floor.suspects(wild, fewest=1)
    floor.add([0.02])
    assert floor.suspects(wild, fewest=RECHECK_TURNS)
    assert not floor.suspects({0: wild[0][1:]}, fewest=RECHECK_TURNS)
    assert not floor.suspects({0: [0.02 * FACTOR] * RECHECK_TURNS}, fewest=RECHECK_TURNS)
    quiet = [0.01] * RECHECK_TURNS
    assert floor.suspects(
        {0: quiet, 3: [math.inf] * RECHECK_TURNS}, fewest=RECHECK_TURNS
    )  # one engine of two
    assert floor.suspects({0: quiet[:4] + [1.0] * 12}, fewest=RECHECK_TURNS)
    assert not floor.suspects({0: quiet[:5] + [1.0] * 11}, fewest=RECHECK_TURNS)
    floor.mismatches.clear()
    assert not floor.suspects(wild, fewest=1)


def test_a_turn_that_is_not_a_number_lies_above_everything() -> None:
    assert turn_mismatch([-1.0, math.nan], [-1.0, -1.0]) == math.inf
    assert turn_mismatch([-1.0, -2.0], [-1.5, -1.0]) == pytest.approx(0.75)
    with pytest.raises(ValueError):
        turn_mismatch([-1.0], [-1.0, -2.0])


# --- a real model in bf16 -----------------------------------------------------------------------


class Scorer:
    """An engine that scores with its own model, in bf16, one text at a time."""

    scores = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.asked = model, list[set[tuple[int, ...]]]()

    @torch.no_grad()
    def score(
        self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Callable[[], list[list[float]]]:
        self.asked.append({tuple(text) for text in texts})
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = [
                trainer_logprobs(
                    self.model,
                    [Sample("", [*t], [0] + [1] * (len(t) - 1), [], [])],
                    temperature=1.0,
                ).tolist()
                for t in texts
            ]
        return lambda: logprobs


@torch.no_grad()
def spoken(model: PreTrainedModel, num: int, *, seed: int) -> list[ScoredTurn]:
    """Turns of 12 ids that the model sampled itself, after prompts of 16 ids."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(VOCAB, (num, 16), generator=generator)
    for _ in range(12):
        shares_BV = model(ids_BT).logits[:, -1].softmax(-1)
        ids_BT = torch.cat([ids_BT, torch.multinomial(shares_BV, 1, generator=generator)], 1)
    return [(ids, [0] * 16 + [1] * 12) for ids in ids_BT.tolist()]


def checked(
    engine: PreTrainedModel,
    *,
    start_bound: float = 0.0,
    exact: bool = False,
    kind: type[SupervisedPolicy] = SupervisedPolicy,
) -> tuple[SyncCheck, Learner]:
    """A check whose floor was measured with equal weights, and its learner in bf16."""
    model = tiny_model()
    learner = learner_of(model)
    learner.compute_dtype = torch.bfloat16
    config = config_of("engine.kind=sglang", "model.dtype=bfloat16")
    scorer: Any = Scorer(model)
    policy_engine = kind(learner, scorer, Offload(learner, ParallelConfig()))
    config = replace(config, engine=ChosenEngine(kind="sglang", exact=exact))
    check = SyncCheck(learner, policy_engine, config, start_bound=start_bound)
    check.keep_turns(spoken(model, MIN_TURNS, seed=0))
    policy_engine.engine = Scorer(engine)  # type: ignore[assignment]
    return check, learner


@pytest.mark.slow
def test_equal_weights_in_bf16_are_never_suspected() -> None:
    """20 steps of the model's own turns, packed for the trainer, one at a time for the engine."""
    check, learner = checked(tiny_model())
    for step in range(1, 21):
        assert check.bound == config_of().engine.max_mismatch
        check.keep_turns(spoken(learner.model, check.num_turns, seed=step))
        assert check.after_push(version=step)["num_suspected"] == 0.0


@pytest.mark.parametrize("mended", [True, False])
def test_other_weights_are_pushed_again_and_end_the_run_only_if_that_mends_nothing(
    mended: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's weights are 2 % too large; the comparison of bits is replaced here. No turn is
    scored twice, on which the stated rate of false alarms rests."""
    large = tiny_model()
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.mul_(1.02)
    pushes: list[int] = []

    class Pushed(SupervisedPolicy):
        def push_again(self, version: int) -> bool:
            pushes.append(version)
            if mended:
                self.engine = Scorer(learner.model)  # type: ignore[assignment]
            return True

    check, learner = checked(large, kind=Pushed)
    scorer: Any = check._engine.engine
    check.keep_turns(spoken(learner.model, check.num_turns, seed=1))
    if mended:
        assert check.after_push(version=7)["num_suspected"] == 1.0
        assert check.after_push(version=8)["num_suspected"] == 0.0
    else:
        with pytest.raises(EngineDisagrees, match="with equal weights the log-prob mismatch"):
            check.after_push(version=7)
        first, second, third = scorer.asked
        assert (len(first), len(second), len(third)) == (FIRST_TURNS, RECHECK_TURNS, RECHECK_TURNS)
        assert not (first & second or first & third or second & third)
    assert pushes == [7] and capsys.readouterr().err


@pytest.mark.parametrize(
    ("floor", "settings", "before", "after"),
    [
        # The floor's largest turn is at 0.2 nats; no comparison yet, then one.
        ([0.2, math.inf], {}, 0.05, FACTOR * 0.2),
        # Random 7B weights differ by 0.051 to 0.055 nats in bf16: the start check's bound is above
        # the setting, and the floor's largest turn far below.
        ([], {"start_bound": 0.14}, 0.14, 0.14),
        ([0.2], {"start_bound": 0.14, "exact": True}, 0.0, 0.0),
    ],
)
def test_noise_raises_the_bound_of_a_rollout_but_not_of_an_exact_engine(
    floor: list[float], settings: dict[str, Any], before: float, after: float
) -> None:
    check, learner = checked(tiny_model(), **settings)
    check._floor.add(floor)
    check.keep_turns(spoken(learner.model, check.num_turns, seed=0))
    assert check.bound == before
    check.after_push(version=1)
    assert check.bound == after
    again, _ = checked(tiny_model(), **settings)
    again._floor.mismatches.clear()
    again.restore(json.loads(json.dumps(check.state())))  # as a resumed run has it
    assert again.bound == after and again.state() == check.state()
    assert NoiseFloor().bound == 0.0


def test_a_healthy_comparison_adds_its_turns_to_the_noise_floor() -> None:
    check, learner = checked(tiny_model())
    before = check.state()["floor"]
    check.keep_turns(spoken(learner.model, check.num_turns, seed=1))
    check.after_push(version=1)
    floor = check.state()["floor"]
    assert floor[: len(before)] == before and len(floor) == len(before) + FIRST_TURNS


def test_a_run_whose_engine_rounds_as_measured_passes_its_first_step(tmp_path: Path) -> None:
    """With engine.max_mismatch=0 the start check's bound is the only one: at least the relative
    step of bf16, at most what a wrong engine would show."""
    words = {"eval.final_games": 1, "engine.max_mismatch": 0, "model.dtype": "bfloat16"}
    begin_warm(tmp_path / "run")
    settings = write_tiny(tmp_path / "run")
    with selfplay.start(settings, words, steps=1, out=tmp_path / "run") as run:
        assert 0.008 * 0.97 <= run.parts.policies[0].sync_check.bound < 0.05
        run.step()


# --- a missed push ----------------------------------------------------------------------------


def test_a_matrix_that_adapters_change_is_compared_after_every_push() -> None:
    model = tiny_model()
    add_adapters(model, LoraConfig(targets=("q_proj", "v_proj")), seed=0)
    learner = learner_of(model)
    for version in range(20):
        names = compared_names(learner, version)
        assert any("q_proj.weight" in name or "v_proj.weight" in name for name in names)


def test_each_parameter_is_compared_in_its_turn() -> None:
    """After as many pushes as there are parameters all were."""
    learner = learner_of(model := tiny_model())
    names = [name for name, _ in model.named_parameters()]
    found = [compared_names(learner, version) for version in range(len(names))]
    assert set().union(*found) == set(names)


@pytest.mark.parametrize("missed", [1, 2])
def test_one_missed_push_is_made_again_and_two_end_the_run(
    missed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One AdamW step at 1e-6; the engine holds a copy of the model, as sharded hf engines do."""
    model = tiny_model()
    calls = [0]

    class Missing(HFEngine):
        def load(self, weights: Weights, version: int) -> None:
            calls[0] += 1
            if calls[0] > missed:
                super().load(weights, version)

    learner, engine = learner_of(model), Missing(tiny_model())
    offload = Offload(learner, ParallelConfig())
    policy_engine = SupervisedPolicy(learner, engine, offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if missed == 1:
        policy_engine.push(3)
        assert capsys.readouterr().err
        weights = dict(engine.model.named_parameters())
        assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())
    else:
        with pytest.raises(EngineDisagrees, match="version 3"):
            policy_engine.push(3)


# --- what a run leaves behind -------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "named"), [(0.05, "engine.max_mismatch"), (0.0, "engine.exact")])
@pytest.mark.parametrize("old", ["off", "on"])
def test_the_rollout_is_compared_before_any_weight_moves(
    old: str, bound: float, named: str
) -> None:
    model, config = tiny_model(seed=1), config_of(f"methods.recompute={old}")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    samples = some_samples(tiny_model(seed=0))
    with pytest.raises(EngineDisagrees, match=named):
        update_policy(
            learner_with(config, model), samples, step=0, config=config, max_mismatch=bound
        )
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ((), True),
        (("algorithm.minibatches=2",), False),
        (("algorithm.minibatches=2", "methods.recompute=on"), True),
    ],
)
def test_the_engines_own_log_probs_are_compared_in_the_first_mini_batch(
    settings: tuple[str, ...], found: bool
) -> None:
    """One sample, of the second mini-batch of two, has log-probs of other weights. Only an update
    of one mini-batch, or one that recomputes log-probs, sees it before a weight moves."""
    model = tiny_model()
    samples = some_samples(model, shift=0.01)
    halves = config_of("algorithm.minibatches=2")
    _, (wrong, *_) = minibatches(samples, step=0, config=halves)
    shifted = [old - 5.0 * m for old, m in zip(wrong.old_logprobs, wrong.mask, strict=True)]
    samples[samples.index(wrong)] = replace(wrong, old_logprobs=shifted)
    config = config_of(*settings)
    with pytest.raises(EngineDisagrees) if found else nullcontext():
        update_policy(
            learner_with(config, model), samples, step=0, config=config, max_mismatch=0.05
        )


def test_a_resumed_run_is_bounded_by_the_noise_that_it_had(tmp_path: Path) -> None:
    """Noise of 0.2 nats from the first step on; the run is stopped after it and goes on."""
    begin_warm(tmp_path / "run")
    settings = (write_tiny(tmp_path / "run"), {"save_every": 1, "eval.final_games": 1})
    with selfplay.start(*settings, out=tmp_path / "run") as run:
        check = run.parts.policies[0].sync_check
        assert check.bound == 0.05
        check._healthy = True
        check._floor.add([0.2] * MIN_TURNS)
        run.step()
    with selfplay.start(*settings, out=tmp_path / "run") as run:
        assert run.parts.policies[0].sync_check.bound == FACTOR * 0.2
        assert run.step().number == 2
