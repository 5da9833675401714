"""The reference: how hard it pulls, when it becomes the policy, and that both survive a stop."""

from __future__ import annotations

import json

import pytest
import torch
from small_updates import config_of, learner_of
from tiny_run import RUNS, finished, metrics_of, tiny_model

from selfplay.learner.reference import adapted_kl_weight, update_reference


def test_the_weight_follows_the_divergence_by_hand() -> None:
    """At the target it stays; 10 % over, it grows by 10 % / horizon; far off, by at most 20 %."""

    def next_weight(measured: float) -> float:
        return adapted_kl_weight(0.5, measured, target=0.1, horizon=10.0)

    assert next_weight(0.1) == pytest.approx(0.5)
    assert next_weight(0.11) == pytest.approx(0.5 * 1.01)
    assert next_weight(0.09) == pytest.approx(0.5 * 0.99)
    assert next_weight(7.0) == pytest.approx(0.5 * 1.02)
    assert next_weight(0.0) == pytest.approx(0.5 * 0.98)


def test_a_weight_that_is_steered_keeps_a_growing_divergence_at_its_target() -> None:
    """A make-believe policy whose divergence is 0.02 / weight: the weight ends at 0.2."""
    weight = 0.01
    for _ in range(400):
        weight = adapted_kl_weight(weight, 0.02 / weight, target=0.1, horizon=2.0)
    assert weight == pytest.approx(0.2, rel=0.01)


def test_follow_moves_only_what_the_settings_ask_for() -> None:
    model, reference = tiny_model(seed=0), tiny_model(seed=1).requires_grad_(False)
    learner = learner_of(model, reference=reference, kl=0.5)
    start = reference.state_dict()["lm_head.weight"].clone()
    still = config_of("algorithm.kl=0.5")
    assert update_reference(learner, {"kl_reference": 9.0}, step=1, algorithm=still.algorithm) == {}
    assert learner.kl == 0.5
    moving = config_of("algorithm.kl=0.5", "algorithm.kl_target=0.1", "algorithm.reference_every=2")
    assert update_reference(learner, {}, step=0, algorithm=moving.algorithm) == {"kl_weight": 0.5}
    assert learner.kl == 0.5, "nothing was trained, so nothing was measured"
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
    assert not torch.equal(reference.lm_head.weight, model.lm_head.weight), "a copy, no alias"


@pytest.mark.parametrize("charged", ["loss", "reward"])
def test_a_run_moves_its_weight_and_its_reference(charged: str) -> None:
    run = finished(*RUNS[f"kl in the {charged}"])
    lines = metrics_of(run)
    weights = [line["kl_weight"] for line in lines]
    assert weights[0] == 0.2 and len(set(weights)) > 2
    saved = json.loads((run / "checkpoints" / "step_000005" / "progress.json").read_text("utf-8"))
    assert saved["kl"] != 0.2
    assert lines[2]["kl_reference"] > 10 * lines[3]["kl_reference"], "the reference caught up"
