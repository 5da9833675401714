"""The controller of the KL weight and updates of the reference, and their state in checkpoints."""

import json

import pytest
import torch

from selfplay.learner.policy_update import adapted_kl_weight, update_reference
from tests.helpers.shared_work import slow_except
from tests.helpers.small_updates import config_of, learner_of
from tests.helpers.tiny_run import RUNS, finished, metrics_of, tiny_model


def test_the_kl_weight_adapts_to_the_measured_kl_by_hand() -> None:
    """At the target it stays; 10 % above, it grows by 10 % / horizon; at most by 20 % / horizon."""

    def next_weight(measured: float) -> float:
        return adapted_kl_weight(0.5, measured, target=0.1, horizon=10.0)

    assert next_weight(0.1) == pytest.approx(0.5)
    assert next_weight(0.11) == pytest.approx(0.5 * 1.01)
    assert next_weight(0.09) == pytest.approx(0.5 * 0.99)
    assert next_weight(7.0) == pytest.approx(0.5 * 1.02)
    assert next_weight(0.0) == pytest.approx(0.5 * 0.98)


def test_an_adapted_kl_weight_brings_the_kl_to_its_target() -> None:
    """For a simulated policy whose KL is 0.02 / weight the weight converges to 0.2."""
    weight = 0.01
    for _ in range(400):
        weight = adapted_kl_weight(weight, 0.02 / weight, target=0.1, horizon=2.0)
    assert weight == pytest.approx(0.2, rel=0.01)


def test_update_reference_changes_only_what_the_settings_name() -> None:
    model, reference = tiny_model(seed=0), tiny_model(seed=1).requires_grad_(False)
    learner = learner_of(model, reference=reference, kl=0.5)
    start = reference.state_dict()["lm_head.weight"].clone()
    fixed = config_of("algorithm.kl=0.5")
    assert update_reference(learner, {"kl_reference": 9.0}, step=1, algorithm=fixed.algorithm) == {}
    assert learner.kl == 0.5
    moving = config_of("algorithm.kl=0.5", "algorithm.kl_target=0.1", "algorithm.reference_every=2")
    assert update_reference(learner, {}, step=0, algorithm=moving.algorithm) == {"kl_weight": 0.5}
    assert learner.kl == 0.5, "a step that measured no KL keeps the weight"
    assert torch.equal(reference.state_dict()["lm_head.weight"], start)
    assert update_reference(learner, {"kl_reference": 9.0}, step=1, algorithm=moving.algorithm) == {
        "kl_weight": 0.5
    }
    assert learner.kl == pytest.approx(0.51)
    held, policy = reference.state_dict(), model.state_dict()
    assert all(torch.equal(held[name], policy[name]) for name in policy)
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert not torch.equal(reference.lm_head.weight, model.lm_head.weight), (
        "the reference is a copy"
    )


@pytest.mark.parametrize("place", slow_except(["loss", "reward"], "loss"))
def test_a_run_changes_its_kl_weight_and_its_reference(place: str) -> None:
    run = finished(*RUNS[f"kl in the {place}"])
    lines = metrics_of(run)
    weights = [line["kl_weight"] for line in lines]
    assert weights[0] == 0.2 and len(set(weights)) > 2
    saved = json.loads((run / "checkpoints" / "step_000005" / "progress.json").read_text("utf-8"))
    assert saved["kl"] != 0.2
    assert lines[2]["kl_reference"] > 10 * lines[3]["kl_reference"], (
        "the reference became the policy"
    )
