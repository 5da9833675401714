"""Importance weights and the mismatch metrics, checked by hand."""

import math
from itertools import compress

import pytest
import torch

from selfplay.learner.rescore import mismatch_values, with_ess
from selfplay.learner.update import update_policy
from selfplay.methods.recompute import importance_weights
from tests.helpers.small_updates import config_of, learner_with, some_samples
from tests.helpers.tiny_run import FORWARD, LOGPROB, tiny_model
from tests.helpers.tolerance import near

# The trainer's probabilities are half, equal to and four times the engine's.
LOG_RATIOS = [math.log(0.5), 0.0, math.log(4.0)]


def test_importance_is_truncated() -> None:
    """Per token, or the product 0.5 x 1 x 4 = 2 for each token of the sequence."""
    assert importance_weights(LOG_RATIOS, level="token", cap=2.0) == pytest.approx([0.5, 1.0, 2.0])
    assert importance_weights(LOG_RATIOS, level="sequence", cap=9.0) == pytest.approx([2.0] * 3)
    assert importance_weights(LOG_RATIOS, level="sequence", cap=1.5) == [1.5] * 3


def test_a_huge_log_ratio_does_not_overflow() -> None:
    assert importance_weights([1e6], level="token", cap=2.0) == [2.0]
    assert importance_weights([-1e6], level="token", cap=2.0) == [0.0]


def test_the_mismatch_by_hand() -> None:
    """Weights 0.5, 1, 4: mean 5.5 / 3, mean square 17.25 / 3, so 1.754 effective tokens of 3."""
    values = mismatch_values(torch.tensor(LOG_RATIOS), torch.zeros(3))
    means = {name: float(value.mean()) for name, value in values.items()}
    metrics = with_ess(means)
    assert metrics.keys() == {"mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_ess"}
    assert metrics["mismatch_mean"] == pytest.approx(3 * math.log(2) / 3)
    assert metrics["mismatch_kl"] == pytest.approx((5.5 - 3 - math.log(2)) / 3)
    assert metrics["mismatch_ess"] == pytest.approx(5.5**2 / (3 * 17.25))


def test_the_mean_of_mismatch_kl_is_the_kl_of_engine_and_trainer() -> None:
    """Weighted with the engine's probabilities it is KL(engine || trainer)."""
    engine_V, trainer_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.3, 0.3])
    values = mismatch_values(trainer_V.log(), engine_V.log())
    exact = (engine_V * (engine_V / trainer_V).log()).sum()
    assert float((engine_V * values["mismatch_kl"]).sum()) == near(float(exact), 64)


def test_recomputed_old_logprobs_make_every_ratio_one() -> None:
    model = tiny_model()
    samples, config = some_samples(model, shift=0.5), config_of("methods.recompute=on")
    learner = learner_with(config, model)
    metrics, _ = update_policy(learner, samples, step=0, config=config, max_mismatch=1.0)
    assert metrics["ratio_mean"] == near(1.0, FORWARD, scale=LOGPROB)
    assert metrics["clip_share"] == 0.0
    assert metrics["mismatch_max"] > 0.4 and metrics["mismatch_mean"] > 0.1, "of the engine's"


def test_importance_is_the_ratio_of_trainer_and_engine() -> None:
    model = tiny_model()
    samples = some_samples(model, num=3, shift=0.4)
    config = config_of("methods.recompute.importance=token")
    (method,) = learner_with(config, model).methods
    recomputed, metrics = method.prepare(samples, step=0, config=config)
    for before, after in zip(samples, recomputed, strict=True):
        log_ratios = torch.tensor(after.old_logprobs) - torch.tensor(before.old_logprobs)
        expected = log_ratios.exp() * torch.tensor(before.mask)
        assert after.columns["importance"] == near(expected.tolist(), FORWARD, scale=LOGPROB)
    weights = [w for s in recomputed for w in compress(s.columns["importance"], s.mask)]
    assert metrics["importance_mean"] == pytest.approx(sum(weights) / len(weights))
