"""Muon's steps are orthogonal, as long as AdamW's, and leave embeddings and vectors to AdamW."""

import pytest
import torch

from selfplay.config import OptimConfig
from selfplay.learner.optimizer import ADAMW_RMS, MOMENTUM, Muon, make_optimizer, orthogonalized
from tests.helpers.tiny_run import tiny_model
from tests.helpers.tolerance import assert_near

# The iteration's singular values wander in this range (Jordan et al. 2024).
LOW, HIGH = 0.68, 1.21


def random_matrices(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (5, 9), (9, 5)])
def test_singular_values_come_near_one_and_their_vectors_stay(rows: int, columns: int) -> None:
    """Of a matrix with singular values from 0.05 to 1: the products with its own vectors."""
    u, _, vt = torch.linalg.svd(random_matrices(rows, columns), full_matrices=False)
    values = torch.logspace(-1.3, 0, len(vt))
    found = orthogonalized(((u * values) @ vt)[None])[0]
    inner = u.T @ found @ vt.T
    assert LOW < float(inner.diagonal().min()) <= float(inner.diagonal().max()) < HIGH
    assert_near(inner, torch.diag(inner.diagonal()), 500 * 5 * 3 * max(rows, columns))


def test_matrices_of_a_batch_do_not_mix_and_zero_stays_zero() -> None:
    batch = torch.stack([random_matrices(4, 7), torch.zeros(4, 7)])
    both, alone = orthogonalized(batch), orthogonalized(batch[:1])
    assert_near(both[0], alone[0], 500 * 5 * 3 * 7)
    assert not both[1].any()


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (24, 8)])
def test_a_step_is_as_long_as_adamws(shape: tuple[int, int]) -> None:
    """Root mean square 0.2 learning rates, whatever the gradient's size and the matrix's shape."""
    for size in (1e-4, 1e4):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = size * random_matrices(*shape)
        Muon([{"params": [weight], "orthogonal": True}], lr=0.01, betas=(0.9, 0.95)).step()
        length = float(weight.detach().square().mean().sqrt()) / (0.01 * ADAMW_RMS)
        # Small singular values of a random matrix may stay below the range.
        assert 0.8 * LOW < length < HIGH


def test_momentum_is_nesterovs_average() -> None:
    """Gradients of I and then -I: m = 0.05 I, then -0.0025 I, and the direction -I (1 - 0.95) +
    0.95 m is negative, so the second step goes back."""
    weight = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=1.0, betas=(0.9, 0.95))
    weight.grad = torch.eye(3)
    optimizer.step()
    once = weight.detach().clone()
    weight.grad = -torch.eye(3)
    optimizer.step()
    first = 1 - MOMENTUM
    expected = (MOMENTUM * first - first) * torch.eye(3)
    assert_near(optimizer.state[weight]["momentum"], expected, 4, held=first)
    assert float(once.diagonal().max()) < 0 < float((weight.detach() - once).diagonal().min())


def test_embeddings_output_layer_and_vectors_take_adamws_steps() -> None:
    ours, other = tiny_model(), tiny_model()
    config = OptimConfig()
    muon = make_optimizer(ours, config, lr=1e-2, kind="muon")
    adamw = make_optimizer(other, config, lr=1e-2)
    for _ in range(3):
        for mine, yours in zip(ours.parameters(), other.parameters(), strict=True):
            mine.grad = random_matrices(*mine.shape)
            yours.grad = mine.grad.clone()
        muon.step()
        adamw.step()
    named = dict(other.named_parameters())
    inside = [n for n, p in named.items() if p.ndim == 2 and "embed" not in n and "head" not in n]
    for name, weight in ours.named_parameters():
        assert ("momentum" in muon.state[weight]) == (name in inside)
        if name not in inside:
            assert_near(weight, named[name], 3 * 8)
    assert inside


def test_bf16_weights_round_up_as_often_as_they_should() -> None:
    """Steps of about 2e-4 on weights of 1, where bf16 numbers lie 1/256 and 1/128 apart: nearest
    rounding would lose them all."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=1e-3, betas=(0.9, 0.95))
    weight.grad = random_matrices(64, 64).bfloat16()
    optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert 0 < int((weight != 1).sum()) < weight.numel()
    assert optimizer.state[weight]["momentum"].dtype == torch.float32
