"""The fused log-prob equals log_softmax with autograd's gradients, without storing all logits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfplay.distributed.shard import VocabShard
from selfplay.model.logprob import token_logprobs
from tests.helpers.tolerance import assert_near, tolerance

M, D, V = 37, 12, 101
TERMS = M + D + V  # the sums on the way there and back


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, D, generator=generator, dtype=dtype)
    weight = torch.randn(V, D, generator=generator, dtype=dtype)
    targets = torch.randint(0, V, (M,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropy


def gradients(
    logprobs: torch.Tensor, entropy: torch.Tensor, leaves: tuple[torch.Tensor, ...], bonus: float
) -> list[torch.Tensor]:
    """Gradients of a sum in which every position has its own weight."""
    weights = torch.linspace(-1, 2, M)
    loss = (weights * logprobs).sum() + (bonus * (weights.flip(0) * entropy).sum() if bonus else 0)
    return list(torch.autograd.grad(loss, leaves))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def test_a_vocabulary_of_two_by_hand() -> None:
    # Logits 0 and 2 at temperature 2 are 0 and 1: p = 1 / (1 + e) and e / (1 + e).
    logprobs, entropy = token_logprobs(
        torch.tensor([[2.0], [2.0]]),
        torch.tensor([[0.0], [1.0]]),
        torch.tensor([0, 1]),
        temperature=2.0,
    )
    p = math.e / (1 + math.e)
    assert logprobs.tolist() == pytest.approx([math.log(1 - p), math.log(p)], abs=tolerance(2))
    assert entropy[0].item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_values_and_gradients_are_those_of_log_softmax(temperature: float, bonus: float) -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = naive(*exact, targets, temperature)
    seen = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=8, entropy_grad=bonus > 0
    )
    for mine, theirs in zip(seen, expected, strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, theirs) < tolerance(TERMS)
    mine = gradients(*seen, (hidden, weight), bonus)
    theirs = gradients(*expected, tuple(exact), bonus)
    for a, b in zip(mine, theirs, strict=True):
        assert relative(a, b) < tolerance(TERMS)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_results_do_not_depend_on_the_chunk(chunk: int) -> None:
    hidden, weight, targets = inputs(torch.float32)
    whole = token_logprobs(hidden, weight, targets, temperature=0.8)
    parts = token_logprobs(hidden, weight, targets, temperature=0.8, chunk=chunk)
    for a, b in zip(parts, whole, strict=True):
        assert_near(a, b, TERMS)
    for a, b in zip(
        gradients(*parts, (hidden, weight), 0.0),
        gradients(*whole, (hidden, weight), 0.0),
        strict=True,
    ):
        assert relative(a, b) < tolerance(TERMS)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_kept_gradients_are_those_of_log_softmax(temperature: float) -> None:
    hidden, weight, targets = inputs()
    want = gradients(*naive(hidden, weight, targets, temperature), (hidden, weight), 0.0)
    values = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=5, keep=True)
    for a, b in zip(gradients(*values, (hidden, weight), 0.0), want, strict=True):
        assert relative(a, b) < tolerance(TERMS)  # the sums are fp32
    recomputed = token_logprobs(hidden, weight, targets, temperature=temperature, keep=False)
    for kept, other in zip(values, recomputed, strict=True):
        assert torch.equal(kept, other)


def test_kept_gradients_of_likely_tokens_survive_half_precision() -> None:
    """Logits 0 and 8: 1 - p = 1 / (1 + e^8) = 0.000335; bf16 numbers near 1 are 0.004 apart."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[0.0], [8.0]], dtype=torch.bfloat16)
    logprob, _ = token_logprobs(hidden, weight, torch.tensor([1]), temperature=1.0, keep=True)
    (grad,) = torch.autograd.grad(logprob.sum(), hidden)
    assert grad.item() == pytest.approx(8 / (1 + math.exp(8)), rel=0.01)


def test_no_positions_give_no_numbers_and_zero_gradients() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0], temperature=1.0)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert not weight.grad.any()


def test_half_precision_keeps_fp32_results() -> None:
    hidden, weight, targets = (x.detach() for x in inputs(torch.float32))
    seen, _ = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, temperature=1.0)
    expected, _ = naive(hidden.bfloat16().float(), weight.bfloat16().float(), targets, 1.0)
    assert seen.dtype == torch.float32
    # Logits of about 10 that were rounded to bf16 would be 0.03 off.
    assert (seen - expected).abs().max() < 1e-4


def test_a_divided_vocabulary_gives_the_results_of_the_full_one() -> None:
    """Three ranks, simulated one after the other: first their statistics, then their gradients."""
    hidden, weight, targets = inputs()
    hidden, weight = hidden.detach().float(), weight.detach().float()
    bounds = [(0, 40), (40, 80), (80, V)]
    stats: list[torch.Tensor] = []

    def record(part: torch.Tensor) -> torch.Tensor:
        stats.append(part)
        return torch.stack([part])

    for start, stop in bounds:
        shard = VocabShard(start, record, lambda part: part)
        token_logprobs(hidden, weight[start:stop], targets, temperature=0.7, shard=shard)
    leaves = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    whole = token_logprobs(*leaves, targets, temperature=0.7, entropy_grad=True)
    expected = gradients(*whole, leaves, 0.3)
    grad_hidden = torch.zeros_like(hidden)
    together = torch.stack(stats)
    for start, stop in bounds:
        mine = (hidden.clone().requires_grad_(), weight[start:stop].clone().requires_grad_())
        shard = VocabShard(start, lambda part: together, lambda part: part)
        seen = token_logprobs(*mine, targets, temperature=0.7, entropy_grad=True, shard=shard)
        assert_near(seen[0], whole[0], TERMS)
        assert_near(seen[1], whole[1], TERMS)
        part_hidden, part_weight = gradients(*seen, mine, 0.3)
        grad_hidden += part_hidden
        assert relative(part_weight, expected[1][start:stop]) < tolerance(TERMS)
    assert relative(grad_hidden, expected[0]) < tolerance(TERMS)


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_logits_of_the_full_batch_never_exist() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with Largest() as largest:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk=4)
        logprobs.sum().backward()
    assert largest.numel <= max(V * D, 4 * V)
    assert largest.numel < M * V
