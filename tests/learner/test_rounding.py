"""Small bf16 updates are lost with rounding to nearest and kept with stochastic rounding."""

import math

import pytest
import torch
from safetensors.torch import load_file

from selfplay.learner.optimizer import RoundedAdamW, rounded
from tests.helpers.tiny_run import RUNS, finished
from tests.helpers.tolerance import assert_near, drawn_share


def test_stochastic_rounding_is_unbiased_and_returns_a_neighbour() -> None:
    """No bf16 number lies between 1 and 1 + 1/128; a quarter of the way rounds up 1 time in 4."""
    exact = torch.full((100_000,), 1 + 0.25 / 128)
    up = rounded(exact, seed=0).float()
    assert set(up.tolist()) == {1.0, 1 + 1 / 128}
    assert float((up - 1).mean() * 128) == drawn_share(0.25, 100_000)
    minus = rounded(-exact, seed=0).float()
    assert float(-(minus + 1).mean() * 128) == drawn_share(0.25, 100_000)


def test_bf16_numbers_are_not_changed() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, math.inf, -math.inf])
    assert torch.equal(rounded(held, seed=3).float(), held)
    assert rounded(torch.tensor([math.nan]), seed=0).isnan().all()


def moved_by(optimizer: torch.optim.Optimizer, weight: torch.Tensor, num_steps: int) -> float:
    """The weights' mean change after steps with equal gradients, where AdamW moves by lr a step."""
    before = weight.detach().float().mean().item()
    for _ in range(num_steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().float().mean().item() - before


def test_steps_of_1e_minus_6_are_lost_in_plain_bf16_and_kept_here() -> None:
    """300 steps of 1e-6 on weights of 1: nothing in plain bf16, 3e-4 in fp32 and here."""
    plain = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
    assert moved_by(torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0), plain, 300) == 0.0
    exact = torch.ones(4096, requires_grad=True)
    adamw = torch.optim.AdamW([exact], lr=1e-6, weight_decay=0.0)
    # Below 1 fp32 numbers lie eps / 2 apart, and every step may be rounded the same way.
    rounding = 300 * torch.finfo(torch.float32).eps / 4
    assert moved_by(adamw, exact, 300) == pytest.approx(-3e-4, abs=rounding)
    ours = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
    optimizer = RoundedAdamW([{"params": [ours]}], lr=1e-6, betas=(0.9, 0.95))
    # Below 1 bf16 numbers lie 1/256 apart: a step takes one down with a chance of 1e-6 * 256.
    num_down = moved_by(optimizer, ours, 300) * -256 / 300
    assert num_down == drawn_share(1e-6 * 256, 300 * 4096)
    assert optimizer.state[ours]["exp_avg_sq"].dtype == torch.float32


def test_on_fp32_weights_it_is_torchs_adamw() -> None:
    """fp32 weights are not rounded; bias correction and moments are torch's."""
    generator = torch.Generator().manual_seed(0)
    mine = torch.randn(50, generator=generator).requires_grad_()
    yours = mine.detach().clone().requires_grad_()
    ours = RoundedAdamW([{"params": [mine]}], lr=1e-2, betas=(0.9, 0.95))
    torchs = torch.optim.AdamW([yours], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(20):
        mine.grad = torch.randn(50, generator=generator)
        yours.grad = mine.grad.clone()
        ours.step()
        torchs.step()
    assert_near(mine, yours, 20 * 8)  # 20 steps of 8 roundings


@pytest.mark.slow
def test_a_bf16_run_ends_with_bf16_weights() -> None:
    held = load_file(finished(*RUNS["bf16"]) / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
