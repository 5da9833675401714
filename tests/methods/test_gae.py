"""GAE by hand and against its closed forms at lambda 0 and 1."""

import random

import pytest

from selfplay.advantages.sample import Sample
from selfplay.methods.ppo import gae, with_gae


def test_three_tokens_by_hand() -> None:
    """d = (0.2 - 0.5, 0.6 - 0.2, 1 - 0.6)."""
    advantages = gae([0.0, 0.0, 1.0], [0.5, 0.2, 0.6], lam=0.5)
    assert advantages == pytest.approx([-0.3 + 0.5 * 0.6, 0.4 + 0.5 * 0.4, 0.4])


def episode(seed: int) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    return ([rng.gauss(0, 1) for _ in range(9)] for _ in range(2))  # type: ignore[return-value]


def test_lambda_0_is_the_one_step_error() -> None:
    """arXiv 1506.02438 eq. 17."""
    rewards, values = episode(0)
    after = [*values[1:], 0.0]
    expected = [r + n - v for r, n, v in zip(rewards, after, values, strict=True)]
    assert gae(rewards, values, lam=0.0) == pytest.approx(expected)


def test_lambda_1_is_the_return_minus_the_value() -> None:
    """arXiv 1506.02438 eq. 18."""
    rewards, values = episode(1)
    expected = [sum(rewards[k:]) - values[k] for k in range(9)]
    assert gae(rewards, values, lam=1.0) == pytest.approx(expected)


def test_tokens_that_the_seat_reads_are_no_steps() -> None:
    """Between two turns, tokens of the other seat and of the game do not decay."""
    mask = [0, 1, 0, 0, 0, 1, 0, 1]
    without_reading, with_reading = (
        Sample(
            *("", [7] * len(mask), mask, [0.0] * len(mask), [0.0] * len(mask)),
            returns=[0.9] * (move + 1) + [1.0] * (len(mask) - move - 1),
        )
        for mask, move in (([0, 1, 1, 1], 2), (mask, 5))
    )
    short = with_gae(without_reading, [0.0, 0.5, 0.2, 0.6], lam=0.5)
    values = [0.0, 0.5, 0.0, 0.0, 0.0, 0.2, 0.0, 0.6]
    long = with_gae(with_reading, values, lam=0.5)
    assert [long.advantages[i] for i in (1, 5, 7)] == short.advantages[1:]
    assert [a for a, m in zip(long.advantages, mask, strict=True) if not m] == [0.0] * 5
    assert short.advantages[1:] == pytest.approx([-0.3 + 0.5 * 0.5, 0.3 + 0.5 * 0.4, 0.4])


def test_the_target_of_a_value_is_advantage_plus_value() -> None:
    """With lambda 1 that is the sum of the rewards to come."""
    sample = Sample("a", [7] * 3, [0, 1, 1], [0.0] * 3, [0.0] * 3, [0.75, 0.75, 0.5])
    sample = with_gae(sample, [0.0, 0.9, -0.3], lam=1.0)
    assert sample.columns["returns"] == pytest.approx([0.0, 0.75, 0.5])
    assert sample.columns["values"] == [0.0, 0.9, -0.3]
