"""examples/one_step.py and the trainer take the same step.

The reference plays one game, one sequence and one token at a time with transformers' own attention
and learns in float64. The trainer's step is packed, batched and in float32. Both sample the same
tokens: a uniform draw would have to fall within rounding of the edge of a token's interval, which
one in a million does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from examples.one_step import Sample, take_step, update
from selfplay.advantages.sample import Sample as RealSample
from selfplay.chat.rendering import make_rendering
from selfplay.chat.tokenizer import load_tokenizer
from selfplay.config import COMPARED_IN_GROUPS, Config
from tests.helpers.processes import measured_by
from tests.helpers.reference_step import (
    RANKS,
    SCRATCH,
    Gradients,
    Real,
    branched_samples,
    first_weights,
    gradients_of,
    learning_rate,
    loss_of,
    plain_model,
    real_run,
    settings_of,
    with_advantages,
)
from tests.helpers.tolerance import assert_all_near, tolerance

# Roundings of a float32 pass through the model: the vocabulary's sum, three norms, the head, four
# projections, 128 positions, the MLP's two. Back again, twice as long, over 8,000 positions, whose
# advantages have both signs: of all that is summed an eighth may be left, so that its roundings
# weigh as those of 64 times as many (2.2e-6 of a largest gradient were seen).
FORWARD = SCRATCH["vocab_size"] + 4 * 16 + 4 * 16 + 128 + 16 + 32
GRADIENT = 3 * FORWARD + 64 * 8_000
# AdamW divides each gradient by its own size, so the rounding of a small one weighs as much as that
# of a large one, and a bias of keys has only small ones: weights are compared by the norm of what
# moved them.
MOVED = 1e-2


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with real_run(tmp_path_factory.mktemp("one step") / "run") as run:
        yield run


class Reference:
    """The reference's own policy, its float64 copy that learns, and its first weights."""

    def __init__(self) -> None:
        self.engine = plain_model()
        self.model, self.first = (copy.deepcopy(self.engine).double() for _ in range(2))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0
        )

    def learn(self, samples: list[Sample], config: Config, step: int) -> Gradients:
        loss = loss_of(config.algorithm, self.first, config.rollout.temperature)
        lr = learning_rate(step, config)
        with gradients_of(self.model, self.optimizer) as gradients:
            update(self.model, self.optimizer, samples, config, step=step, lr=lr, loss=loss)
        return gradients


def assert_same_samples(found: Sequence[Any], expected: Sequence[Sample]) -> None:
    """The same names, tokens and masks; log-probs within a pass, advantages within 1e-9."""
    assert [sample.name for sample in found] == [sample.name for sample in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.mask) == (other.ids, other.mask), one.name
        assert other.trained(one.old_logprobs) == pytest.approx(
            other.trained(other.old_logprobs), abs=tolerance(FORWARD, scale=10.0)
        )
        assert one.advantages == pytest.approx(other.advantages, abs=1e-9), one.name


def assert_same_weights(real: PreTrainedModel, model: PreTrainedModel, before: Any) -> None:
    found = dict(real.named_parameters())
    for name, weight in model.named_parameters():
        moved = (weight - before[name]).norm().item()
        # A rounding of the weight in each of at most eight optimizer steps.
        bound = MOVED * moved + tolerance(8, scale=weight.norm().item())
        assert (found[name] - weight).norm().item() <= bound, name


def assert_same_step(real: Real, config: Config, step: int, baselines: dict[str, float]) -> None:
    reference = Reference()
    real.begin(config, step, baselines)
    played, gradients = real.step(step)
    games, samples = branched_samples(reference.engine, real.rendering, config, step)
    for game, episode in zip(games, played.episodes, strict=True):
        tokens = [transcript.ids for transcript in episode.transcripts if transcript is not None]
        assert tokens == [sample.ids for sample in game.samples]
    kept = with_advantages(samples, config.algorithm, baselines)
    assert_same_samples(played.samples, kept)
    expected = reference.learn(kept, config, step)
    assert len(gradients) == len(expected)
    for one, other in zip(gradients, expected, strict=True):
        assert_all_near(one, other, GRADIENT)
    assert_same_weights(real.model, reference.model, dict(reference.first.named_parameters()))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Config, int, dict[str, float]]:
    """Settings, the number of steps before, and the moving averages of `ema`."""

    def one_of(*values: object) -> Any:
        return draw(st.sampled_from(values))

    advantage = one_of("grpo", "dr_grpo", "rloo", "turns", "reinforce_pp", "ema")
    branch, loss = one_of("none", "first", "all"), one_of("clip", "gspo", "cispo", "reinforce")
    points = {"turns": branch, "siblings": 2, "continuations": one_of(1, 2)}
    if branch == "none" or advantage not in COMPARED_IN_GROUPS:
        points = {}
    chosen = {
        "algorithm__advantage": advantage,
        "algorithm__loss": loss,
        "algorithm__minibatches": one_of(1, 2, 3),
        "algorithm__epochs": one_of(1, 2),
        "algorithm__clip_low": one_of(0.2, 0.03),
        "algorithm__clip_high": one_of(0.2, 0.03),
        "algorithm__dual_clip": one_of(0.0, 1.05) if loss in ("clip", "gspo") else 0.0,
        "algorithm__kl": one_of(0.0, 0.1),
        **({"rollout__play": "branches", "rollout__options": points} if points else {}),
        "rollout__instances": 2,
        "rollout__group_size": 2 if points.get("turns") == "all" else 4,
        "rollout__temperature": one_of(1.0, 0.7),
        "game__options__cost": one_of(0.25, 0.0),
        "reward__error_penalty": one_of(0.0, 0.3),
        "reward__token_cost": one_of(0.0, 0.01),
        "optim__lr": 3e-3,
        "optim__schedule": one_of("constant", "linear", "cosine"),
        "optim__warmup_steps": one_of(0, 3),
        "optim__final_share": one_of(0.0, 0.5),
        "optim__max_grad_norm": one_of(1.0, 0.1, 0.0),
        "optim__share_prefixes": one_of(True, False),
        "optim__tokens_per_microbatch": one_of(16_384, 64),
        "seed": one_of(*range(8)),
        "steps": 10,
    }
    if branch == "none":
        chosen["rollout__options"] = {}
    states = ({}, {"seat 0": 0.1, "seat 1": -0.2, "seat 2": 0.3})
    return settings_of(**chosen), one_of(0, 1, 6), dict(one_of(*states))


# A smaller case of a failure would cost minutes to find.
CASES: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}


@settings(max_examples=4, **CASES)
@given(case=drawn())
def test_the_trainer_and_the_reference_take_the_same_step(
    real: Real, case: tuple[Config, int, dict[str, float]]
) -> None:
    """Sampled tokens, masks, advantages, the gradient of each optimizer step, and the weights."""
    assert_same_step(real, *case)


@pytest.mark.slow
@settings(max_examples=40, **CASES)
@given(case=drawn())
def test_the_trainer_and_the_reference_take_the_same_step_under_many_settings(
    real: Real, case: tuple[Config, int, dict[str, float]]
) -> None:
    assert_same_step(real, *case)


def test_steps_follow_each_other_as_in_the_example(real: Real) -> None:
    """Two steps under default settings by the example's own `take_step`: the second is played with
    the weights that the first has learnt, and with AdamW's moments of it."""
    games = {"rollout__instances": 2, "rollout__group_size": 4}
    config = settings_of(**games, optim__lr=3e-3, optim__warmup_steps=2)
    reference = Reference()
    real.begin(config, 0, {})
    for number in range(2):
        before = {name: weight.clone() for name, weight in reference.model.named_parameters()}
        played, gradients = real.step(number)
        with gradients_of(reference.model, reference.optimizer) as expected:
            _, samples = take_step(
                number,
                reference.engine,
                reference.model,
                reference.optimizer,
                real.rendering,
                config,
            )
        kept = {sample.name: sample for sample in samples if any(sample.advantages)}
        assert_same_samples(played.samples, [kept[sample.name] for sample in played.samples])
        assert len(played.samples) == len(kept)
        assert_all_near(gradients[0], expected[0], GRADIENT)
        assert_same_weights(real.model, reference.model, before)


@pytest.mark.slow
def test_two_ranks_and_the_reference_take_the_same_step() -> None:
    """Two gloo ranks share a step's instances, samples and weights; the reference has all."""
    measured = measured_by("reference_ranks:one_step", str(first_weights()))
    config, reference = settings_of(**RANKS), Reference()
    rendering = make_rendering(load_tokenizer(first_weights()))
    _, samples = branched_samples(reference.engine, rendering, config, 0)
    kept = with_advantages(samples, config.algorithm, {})
    found = {fields["name"]: RealSample(**fields) for fields in measured["samples"]}
    assert_same_samples([found[sample.name] for sample in kept], kept)
    assert len(found) == len(kept) and min(measured["num_samples"]) > 0
    (expected,) = reference.learn(kept, config, 0)
    gradient = {name: torch.tensor(values) for name, values in measured["gradient"].items()}
    assert_all_near(gradient, expected, GRADIENT)
