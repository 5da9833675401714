"""The losses against a loop that a reader can follow, and against their gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch

from selfplay.loss import clipped_surrogate, imitation, kl_estimate

LOW, HIGH = 0.2, 0.3


def naive(logprob: float, old: float, advantage: float) -> tuple[float, bool]:
    """PPO's clip, case by case: the loss, and whether its gradient is gone."""
    ratio = math.exp(logprob - old)
    if advantage > 0 and ratio > 1 + HIGH:
        return -(1 + HIGH) * advantage, True
    if advantage < 0 and ratio < 1 - LOW:
        return -(1 - LOW) * advantage, True
    return -ratio * advantage, False


# Ratios below, at and above the clip range, with advantages of both signs and none.
CASES = [(-1.0 + gap, -1.0, a) for gap in (-0.9, -0.1, 0.0, 0.1, 0.9) for a in (-2.0, 0.0, 1.5)]


def test_clipped_surrogate_is_the_naive_loop() -> None:
    logprobs_M, old_M, advantages_M = torch.tensor(CASES).unbind(1)
    logprobs_M.requires_grad_()
    losses_M, ratios_M, cut_M = clipped_surrogate(
        logprobs_M, old_M, advantages_M, clip_low=LOW, clip_high=HIGH
    )
    losses_M.sum().backward()
    assert logprobs_M.grad is not None
    for place, case in enumerate(CASES):
        loss, gone = naive(*case)
        assert losses_M[place].item() == pytest.approx(loss, rel=1e-5)
        # The gradient of an unclipped loss is the loss itself, since d ratio / d logprob = ratio.
        assert logprobs_M.grad[place].item() == pytest.approx(0.0 if gone else loss, rel=1e-5)
        assert bool(cut_M[place]) == gone
        assert ratios_M[place].item() == pytest.approx(math.exp(case[0] - case[1]), rel=1e-5)
    assert cut_M.sum() == 2, "one case of each sign is clipped"


def test_ratio_one_gives_the_reinforce_gradient() -> None:
    logits_MV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    advantages_M = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    logprobs_M = logits_MV.log_softmax(-1)[:, 2]
    surrogate, _, _ = clipped_surrogate(
        logprobs_M, logprobs_M.detach(), advantages_M, clip_low=LOW, clip_high=HIGH
    )
    (got,) = torch.autograd.grad(surrogate.sum(), logits_MV, retain_graph=True)
    (expected,) = torch.autograd.grad((-advantages_M * logprobs_M).sum(), logits_MV)
    torch.testing.assert_close(got, expected)


def test_k3_by_hand() -> None:
    """The reference gives half, the same, and twice the policy's probability."""
    logprobs_M = torch.log(torch.tensor([0.4, 0.4, 0.4]))
    reference_M = torch.log(torch.tensor([0.2, 0.4, 0.8]))
    expected = torch.tensor([0.5 + math.log(2) - 1, 0.0, 2 - math.log(2) - 1])
    torch.testing.assert_close(kl_estimate(logprobs_M, reference_M, estimator="k3"), expected)


def test_k3_averages_to_the_divergence() -> None:
    """Summed over the policy's own probabilities it is KL(policy || reference)."""
    policy_V, reference_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    k3_V = kl_estimate(policy_V.log(), reference_V.log(), estimator="k3")
    divergence = (policy_V * (policy_V / reference_V).log()).sum()
    assert float((policy_V * k3_V).sum()) == pytest.approx(float(divergence), rel=1e-5)


def test_imitation_is_weighted_cross_entropy() -> None:
    losses_M = imitation(torch.log(torch.tensor([0.5, 0.25])), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(losses_M, torch.tensor([math.log(2), 4 * math.log(2)]))
