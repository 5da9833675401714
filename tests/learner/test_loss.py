"""The losses against a plain loop, and their gradients by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfplay.config import AlgorithmConfig
from selfplay.config.plugins import PLUGINS, function_of
from selfplay.learner.loss import kl_estimate, kl_losses
from tests.helpers.small_updates import batch_of
from tests.helpers.tolerance import near

CLIPPED = AlgorithmConfig(clip_low=0.2, clip_high=0.3)


def loss_of(
    name: str, logprobs_M: torch.Tensor, batch: Any, algorithm: AlgorithmConfig = CLIPPED
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, ratios and clip mask [M] of the loss that settings call `name`."""
    losses_M, metrics = function_of("algorithm.loss", name)(logprobs_M, batch, algorithm)
    return losses_M, metrics["ratio_mean"], metrics["clip_share"]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    """Ratio 5 against A = -2: PPO's loss is 10, with c = 3 it is 6 and has no gradient."""
    logprobs_M = torch.log(torch.tensor([0.5, 0.2, 0.5])).requires_grad_()
    old_M = torch.log(torch.tensor([0.1, 0.1, 0.1]))
    batch = batch_of(old_M, torch.tensor([-2.0, -2.0, 2.0]))
    losses_M, _, cut_M = loss_of("clip", logprobs_M, batch, replace(CLIPPED, dual_clip=3.0))
    (grad_M,) = torch.autograd.grad(losses_M.sum(), logprobs_M)
    assert losses_M.tolist() == near([6.0, 4.0, -2.6], 16)
    assert grad_M.tolist() == near([0.0, 4.0, 0.0], 16)
    assert cut_M.tolist() == [1, 0, 1]


def test_a_token_counts_as_clipped_where_the_clip_takes_its_gradient() -> None:
    """Above 1.3 with A > 0 and below 0.8 with A < 0; not where the other term is the smaller."""
    ratios_M = torch.tensor([2.0, 2.0, 0.5, 0.5]).log().requires_grad_()
    batch = batch_of(torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    losses_M, _, cut_M = loss_of("clip", ratios_M, batch)
    (grad_M,) = torch.autograd.grad(losses_M.sum(), ratios_M)
    assert cut_M.tolist() == (grad_M == 0).tolist() == [True, False, False, True]


# Two sequences of two and three tokens: log-ratios 0.2, 0.4 and -0.3, 0.0, 0.6.
SAMPLE = torch.tensor([0, 0, 1, 1, 1])
LOG_RATIOS = torch.tensor([0.2, 0.4, -0.3, 0.0, 0.6])


def test_gspo_has_one_ratio_a_sequence() -> None:
    """exp(0.3) is above 1 + 0.3 and clipped where A > 0; exp(0.1) is not. A token's gradient is its
    sequence's ratio times its own advantage; advantages may differ within a sequence."""
    old_M = torch.full((5,), -1.0)
    logprobs_M = (old_M + LOG_RATIOS).requires_grad_()
    advantages_M = torch.tensor([1.0, 1.0, -2.0, -2.0, 0.5])
    batch = batch_of(old_M, advantages_M, SAMPLE)
    losses_M, ratios_M, cut_M = loss_of("gspo", logprobs_M, batch)
    s = math.exp(0.1)
    (grad_M,) = torch.autograd.grad(losses_M.sum(), logprobs_M)
    assert ratios_M.tolist() == near([math.exp(0.3)] * 2 + [s] * 3, 16)
    assert losses_M.tolist() == near([-1.3, -1.3, 2 * s, 2 * s, -0.5 * s], 16)
    assert grad_M.tolist() == near([0, 0, 2 * s, 2 * s, -0.5 * s], 16)
    assert cut_M.tolist() == [1, 1, 0, 0, 0]


def test_cispo_keeps_every_gradient_and_bounds_its_weight() -> None:
    """Ratios 0.5, 1, 2 under bounds 0.8 and 1.3: weights 0.8, 1, 1.3."""
    logprobs_M = torch.log(torch.tensor([0.1, 0.2, 0.4])).requires_grad_()
    old_M = torch.log(torch.tensor([0.2, 0.2, 0.2]))
    batch = batch_of(old_M, torch.tensor([1.0, -1.0, 2.0]))
    losses_M, ratios_M, cut_M = loss_of("cispo", logprobs_M, batch)
    (grad_M,) = torch.autograd.grad(losses_M.sum(), logprobs_M)
    assert ratios_M.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert grad_M.tolist() == pytest.approx([-0.8, 1.0, -2.6])
    assert losses_M.tolist() == pytest.approx(
        [-0.8 * math.log(0.1), math.log(0.2), -2.6 * math.log(0.4)]
    )
    assert cut_M.tolist() == [1, 0, 1]


def test_reinforce_ignores_the_ratio() -> None:
    logprobs_M = torch.log(torch.tensor([0.1, 0.4])).requires_grad_()
    batch = batch_of(torch.log(torch.tensor([0.2, 0.2])), torch.tensor([2.0, -1.0]))
    losses_M, ratios_M, cut_M = loss_of("reinforce", logprobs_M, batch)
    (grad_M,) = torch.autograd.grad(losses_M.sum(), logprobs_M)
    assert losses_M.tolist() == pytest.approx([-2 * math.log(0.1), math.log(0.4)])
    assert grad_M.tolist() == [-2.0, 1.0] and not cut_M.any()
    assert ratios_M.tolist() == pytest.approx([0.5, 2.0])


# --- the KL of two known distributions ----------------------------------------------------------

REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))


def exact_kl(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    return (p_V * (p_V / q_V).log()).sum()


def test_k1_k2_k3_by_hand() -> None:
    """The reference's probability is half, equal to and twice the policy's."""
    logprobs_M = torch.log(torch.tensor([0.4, 0.4, 0.4]))
    reference_M = torch.log(torch.tensor([0.2, 0.4, 0.8]))
    two = math.log(2)
    for estimator, expected in {
        "k1": [two, 0.0, -two],
        "k2": [0.5 * two**2, 0.0, 0.5 * two**2],
        "k3": [0.5 + two - 1, 0.0, 2 - two - 1],
    }.items():
        got_M = kl_estimate(logprobs_M, reference_M, estimator=estimator)
        assert got_M.tolist() == near(expected, 16)


def mean_gradient(estimator: str, *, where: str) -> torch.Tensor:
    """The gradient on the logits, averaged over the policy's three tokens: of the estimate, or of
    the estimate times the ratio."""
    logits_V = LOGITS.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    old_V = logprobs_V.detach()
    kl_V = kl_estimate(logprobs_V, REFERENCE.log(), estimator=estimator)
    terms_V = kl_V * (logprobs_V - old_V).exp() if where == "ratio" else kl_V
    (gradient_V,) = torch.autograd.grad((old_V.exp() * terms_V).sum(), logits_V)
    return gradient_V


def exact_gradient(*, forward: bool) -> torch.Tensor:
    logits_V = LOGITS.clone().requires_grad_()
    pair = (REFERENCE, logits_V.softmax(0))
    (gradient_V,) = torch.autograd.grad(exact_kl(*(pair if forward else pair[::-1])), logits_V)
    return gradient_V


def test_what_the_gradient_of_each_estimator_means() -> None:
    """In the loss k1 has no gradient, k2 that of KL(policy || reference), k3 that of
    KL(reference || policy). Times the ratio k1 and k3 have the first of these."""
    reverse, forward = exact_gradient(forward=False), exact_gradient(forward=True)
    torch.testing.assert_close(mean_gradient("k1", where="loss"), torch.zeros(3).double())
    torch.testing.assert_close(mean_gradient("k2", where="loss"), reverse)
    torch.testing.assert_close(mean_gradient("k3", where="loss"), forward)
    for name in ("k1", "k3"):
        torch.testing.assert_close(mean_gradient(name, where="ratio"), reverse)
    # This far apart the two KLs have different gradients.
    assert (reverse - forward).norm() > 0.1 * reverse.norm()


def test_the_ratio_corrects_k3_for_an_engine_with_other_probabilities() -> None:
    """Tokens come from an engine whose rounding swaps two of three probabilities. Times the ratio
    the mean gradient is still that of KL(policy || reference); without it, it is another one. A
    token that the engine finds likely and the trainer does not has an enormous gradient alone."""
    engine_V = LOGITS.softmax(0)[torch.tensor([0, 2, 1])]
    logits_V = LOGITS.clone().requires_grad_()
    algorithm = AlgorithmConfig(kl=0.1)
    batch: Any = SimpleNamespace(old_logprobs_M=engine_V.log())
    gradients = []
    for estimator in ("k3_ratio", "k3"):
        settings = replace(algorithm, kl_estimator=estimator)
        kl_V = kl_losses(logits_V.log_softmax(0), REFERENCE.log(), batch, settings)
        gradients.append(torch.autograd.grad((engine_V * kl_V).sum(), logits_V)[0])
    exact = exact_gradient(forward=False)
    torch.testing.assert_close(gradients[0], exact)
    assert (gradients[1] - exact).norm() > 0.1 * exact.norm()

    batch.old_logprobs_M = torch.tensor([-1.0])
    for estimator, bound in (("k3_ratio", 1e-3), ("k3", 1e5)):
        logprobs_M = torch.tensor([-12.0], requires_grad=True)
        settings = replace(algorithm, kl_estimator=estimator)
        kl_losses(logprobs_M, torch.tensor([-0.5]), batch, settings).sum().backward()
        assert 0.1 * bound < abs(logprobs_M.grad.item()) < bound


@pytest.mark.parametrize("log_ratio", [-99.0, 99.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize(
    ("loss", "dual_clip"),
    [*((loss, 0.0) for loss in PLUGINS["algorithm.loss"].built_in), ("clip", 3.0)],
)
def test_a_log_ratio_far_beyond_exp_has_a_finite_loss_and_gradient(
    loss: str, dual_clip: float, advantage: float, log_ratio: float
) -> None:
    """The other token, at ratio 1, keeps its gradient unless the ratio is that of the sequence."""
    logprobs_M = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = batch_of(torch.tensor([-1.0 - log_ratio, -1.0]), torch.tensor([advantage] * 2))
    algorithm = replace(CLIPPED, dual_clip=dual_clip)
    losses_M, ratios_M, _ = loss_of(loss, logprobs_M, batch, algorithm)
    losses_M.sum().backward()
    assert losses_M.isfinite().all() and ratios_M.isfinite().all()
    assert logprobs_M.grad is not None and logprobs_M.grad.isfinite().all()
    assert float(ratios_M.max()) <= math.exp(20.0) * (1 + 1e-5)
    if loss != "gspo":
        assert logprobs_M.grad[1].item() == pytest.approx(-advantage, rel=1e-5)


@pytest.mark.parametrize(
    ("d", "clamped", "gradient"),
    [(-99.0, -20.0, 0.0), (99.0, 20.0, 0.0), (3.0, 3.0, 1.0 - math.exp(3.0))],
)
def test_k3_is_finite_far_beyond_exp_and_not_capped_where_exp_holds(
    d: float, clamped: float, gradient: float
) -> None:
    """At d = 3 k3 is 16.1, above verl's cap of 10, and keeps its gradient."""
    logprobs_M = torch.tensor([-4.0], requires_grad=True)
    k3_M = kl_estimate(logprobs_M, torch.tensor([-4.0 + d]), estimator="k3")
    k3_M.sum().backward()
    assert k3_M.item() == pytest.approx(math.exp(clamped) - 1.0 - clamped, rel=1e-5)
    assert logprobs_M.grad.item() == pytest.approx(gradient, rel=1e-5)
