"""The reference that moves: where it is after each step, by hand and beside a second model."""

from copy import deepcopy
from itertools import compress
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.apps.report.run_files import read_run
from selfplay.learner.method import Parts, make_methods
from selfplay.learner.update import update_policy
from selfplay.methods.kl_reference import KLReference
from selfplay.methods.options import OPTIONS
from tests.helpers.small_updates import change, config_of, learner_of, some_samples
from tests.helpers.tiny_run import (
    FORWARD,
    LOGPROB,
    LORA,
    RUNS,
    finished,
    metrics_of,
    tiny_model,
    trainer_logprobs,
)
from tests.helpers.tolerance import near

CONSTANT = "optim.schedule=constant"
KL = ("algorithm.kl=0.3", "algorithm.kl_estimator=k2")


def reference_of(model: PreTrainedModel, *settings: str) -> KLReference:
    learner = learner_of(model)
    config = config_of(*KL, *settings)
    learner.methods = make_methods(Parts(config, learner, lambda: model))
    (method,) = learner.methods
    assert isinstance(method, KLReference)
    return method


def fill(model: PreTrainedModel, value: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)


def values(method: KLReference) -> set[float]:
    return {float(value) for kept in method.kept.values() for value in kept.unique()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # It becomes the policy before steps 2 and 4.
        (("methods.kl_reference.every=2",), [0.0, 0.0, 2.0, 2.0, 4.0]),
        # A quarter of the way from 0 to 1, from there to 2, …: 0.25, 0.6875, 1.265625, 1.94921875.
        (("methods.kl_reference.average=0.25",), [0.0, 0.25, 0.6875, 1.265625, 1.94921875]),
    ],
)
def test_where_the_reference_is_by_hand(settings: tuple[str, ...], expected: list[float]) -> None:
    """Before step n each weight of the policy is n."""
    model = tiny_model()
    fill(model, 0.0)
    method, config = reference_of(model, *settings), config_of(*KL)
    found = []
    for step in range(5):
        fill(model, float(step))
        method.prepare([], step=step, config=config)
        assert {float(value) for p in model.parameters() for value in p.detach().unique()} == {
            float(step)
        }
        (value,) = values(method)
        found.append(value)
    assert found == expected


def test_a_move_that_is_due_in_a_rest_is_made_after_it() -> None:
    """Every third step, but the policy rests in the steps 4 and 5 and the run is resumed there."""
    model = tiny_model()
    fill(model, 0.0)
    settings = "methods.kl_reference.every=3"
    method, config = reference_of(model, settings), config_of(*KL)
    found = []
    for step in (0, 2, 5, 6, 8):
        fill(model, float(step))
        method.restore(method.state())
        method.prepare([], step=step, config=config)
        found += values(method)
    assert found == [0.0, 0.0, 5.0, 6.0, 6.0]


def test_an_average_of_bf16_weights_is_right_on_average() -> None:
    """A hundredth of the way from 1 to 1.5 is 0.005, less than half of the distance of 0.0078 to
    the next bf16 number, so rounding to nearest would never move it."""
    model = tiny_model().bfloat16()
    fill(model, 1.0)
    method = reference_of(model, "methods.kl_reference.average=0.005")
    fill(model, 1.5)
    method.prepare([], step=1, config=config_of(*KL))
    moved = torch.cat([kept.float().flatten() for kept in method.kept.values()])
    assert set(moved.unique().tolist()) == {1.0, 1.0078125}
    spread = 0.0078125 * (0.32 * 0.68 / len(moved)) ** 0.5
    assert abs(float(moved.mean()) - 1.0025) < 5 * spread


def test_its_log_probs_are_those_of_a_second_model() -> None:
    model, other = tiny_model(), tiny_model(seed=4)
    method = reference_of(model, "methods.kl_reference.every=3")
    for kept, weight in zip(method.kept.values(), other.parameters(), strict=True):
        kept.copy_(weight.detach())
    before, samples = deepcopy(model.state_dict()), some_samples(model)
    given, _ = method.prepare(samples, step=1, config=config_of(*KL))
    column = [x for s in given for x in compress(s.columns["reference"], s.mask)]
    expected = trainer_logprobs(other, samples, temperature=1.0).tolist()
    assert column == [near(logprob, FORWARD, scale=LOGPROB) for logprob in expected]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_until_it_moves_the_update_is_that_of_the_fixed_reference() -> None:
    """The same gradient and metrics, bit for bit, beside a second model as reference."""
    other, samples = tiny_model(seed=4), some_samples(tiny_model())
    expected, metrics = change(tiny_model(), samples, *KL, reference=other)
    model = tiny_model()
    method = reference_of(model, "methods.kl_reference.every=3")
    for kept, weight in zip(method.kept.values(), other.parameters(), strict=True):
        kept.copy_(weight.detach())
    given, _ = method.prepare(samples, step=1, config=config_of(*KL))
    found, own = change(model, given, *KL)
    assert own["kl_reference"] == metrics["kl_reference"] > 0.01 and own == metrics
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_reference_that_has_just_moved_pulls_nowhere() -> None:
    model = tiny_model()
    method, samples = reference_of(model, "methods.kl_reference.every=2"), some_samples(model)
    learner = method.parts.learner
    config = config_of(*KL, "optim.lr=0.01", "methods.kl_reference.every=2")
    kls = []
    for step in range(4):
        metrics, _ = update_policy(learner, samples, step=step, config=config, max_mismatch=9.0)
        kls.append(metrics["kl_reference"])
    assert kls[0] == kls[2] == 0.0 and min(kls[1], kls[3]) > 1e-6


@pytest.mark.parametrize("kind", OPTIONS.values(), ids=OPTIONS)
def test_no_method_refuses_its_own_defaults(kind: Any) -> None:
    """The page and --help compare settings with them; `check` refuses what a run cannot use."""
    assert kind() == kind()


def test_the_page_shows_when_the_reference_moves() -> None:
    run = read_run(finished(*RUNS["moving reference"]))
    assert ("methods.kl_reference.every", "1", "3") in run.settings


def test_a_run_holds_its_policy_to_the_reference_that_moved() -> None:
    """After the third step; with adapters too, whose reference has adapters of its own."""
    kls = [line["kl_reference"] for line in metrics_of(finished(*RUNS["moving reference"]))]
    assert kls[0] == kls[3] == 0.0 and min(kls[1], kls[2], kls[4]) > 1e-7
    moved, still = (
        [line["kl_reference"] for line in metrics_of(finished(*LORA, *settings, CONSTANT))]
        for settings in (("methods.kl_reference.average=0.25",), ())
    )
    assert moved[0] == still[0] and 0 < moved[3] < still[3]
