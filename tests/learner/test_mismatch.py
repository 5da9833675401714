"""Importance weights, rejection and the mismatch metrics, checked by hand."""

import math

import pytest
import torch

from selfplay.learner.mismatch import importance_weights, mismatch_metrics, mismatch_values
from tests.helpers.tolerance import near

# The trainer's probabilities are half, equal to and four times the engine's.
LOG_RATIOS = [math.log(0.5), 0.0, math.log(4.0)]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"cap": 2.0, "low": 0.0, "high": 0.0}, [0.5, 1.0, 2.0]),
        ({"cap": 0.0, "low": 0.0, "high": 5.0}, [0.5, 1.0, 4.0]),
        ({"cap": 0.0, "low": 0.6, "high": 3.0}, [0.0, 1.0, 0.0]),
        ({"cap": 2.0, "low": 0.6, "high": 5.0}, [0.0, 1.0, 2.0]),
    ],
)
def test_token_importance_is_truncated_and_rejected(
    bounds: dict[str, float], expected: list[float]
) -> None:
    assert importance_weights(LOG_RATIOS, level="token", **bounds) == pytest.approx(expected)


def test_sequence_importance_is_the_product() -> None:
    """0.5 x 1 x 4 = 2 for each of its tokens."""
    free = importance_weights(LOG_RATIOS, level="sequence", cap=0.0, low=0.0, high=9.0)
    assert free == pytest.approx([2.0] * 3)
    cut = importance_weights(LOG_RATIOS, level="sequence", cap=1.5, low=0.0, high=0.0)
    assert cut == [1.5] * 3
    none = importance_weights(LOG_RATIOS, level="sequence", cap=1.5, low=0.0, high=1.9)
    assert none == [0.0] * 3


def test_a_huge_log_ratio_does_not_overflow() -> None:
    assert importance_weights([1e6], level="token", cap=2.0, low=0.0, high=0.0) == [2.0]
    assert importance_weights([-1e6], level="token", cap=2.0, low=0.0, high=0.0) == [0.0]


def test_the_mismatch_by_hand() -> None:
    """Weights 0.5, 1, 4: mean 5.5 / 3, mean square 17.25 / 3, so 1.754 effective tokens of 3."""
    values = mismatch_values(torch.tensor(LOG_RATIOS), torch.zeros(3))
    means = {name: float(value.mean()) for name, value in values.items()}
    metrics = mismatch_metrics(means)
    assert metrics.keys() == {"mismatch_mean", "mismatch_kl", "mismatch_ess"}
    assert metrics["mismatch_mean"] == pytest.approx(3 * math.log(2) / 3)
    assert metrics["mismatch_kl"] == pytest.approx((5.5 - 3 - math.log(2)) / 3)
    assert metrics["mismatch_ess"] == pytest.approx(5.5**2 / (3 * 17.25))


def test_the_mean_of_mismatch_kl_is_the_kl_of_engine_and_trainer() -> None:
    """Weighted with the engine's probabilities it is KL(engine || trainer)."""
    engine_V, trainer_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.3, 0.3])
    values = mismatch_values(trainer_V.log(), engine_V.log())
    exact = (engine_V * (engine_V / trainer_V).log()).sum()
    assert float((engine_V * values["mismatch_kl"]).sum()) == near(float(exact), 64)
