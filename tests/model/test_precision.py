"""A cast to fp32 keeps its promise inside autocast, which lowers the factors of every product.

One CPU process with model.dtype=bfloat16 computes under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from selfplay.distributed import plus_product
from selfplay.learner.batch import pack
from selfplay.learner.learner import batch_logprobs
from selfplay.model.attention import _explicit
from selfplay.model.logprob import token_logprobs
from selfplay.model.policy import hidden_states
from tests.helpers.small_updates import learner_of, ppo_of, some_samples
from tests.helpers.tiny_run import CPU, tiny_model


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _logprobs(hidden: Tensor, weight: Tensor, cap: float | None) -> list[Tensor]:
    """Log-probs, entropies and their gradients, all computed here."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    targets = torch.arange(len(hidden)) % len(weight)
    both = token_logprobs(
        leaves[0], leaves[1], targets, temperature=0.7, entropy_grad=True, cap=cap
    )
    return [*both, *torch.autograd.grad(both[0].sum() + 0.1 * both[1].sum(), leaves)]


WAYS: dict[str, Callable[[], list[Tensor]]] = {
    "log-probs of fp32": lambda: _logprobs(_draw(6, 32, seed=0), _draw(70, 32, seed=1), None),
    "log-probs of bf16": lambda: _logprobs(
        _draw(6, 32, seed=0).bfloat16(), _draw(70, 32, seed=1).bfloat16(), None
    ),
    "capped log-probs": lambda: _logprobs(_draw(6, 32, seed=0), _draw(70, 32, seed=1), 5.0),
    "merged adapters": lambda: [
        plus_product(_draw(8, 6, seed=0), _draw(8, 3, seed=1), _draw(3, 6, seed=2), scale=0.5)
    ],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_autocast_changes_no_bit(way: Callable[[], list[Tensor]]) -> None:
    expected = way()
    with torch.autocast("cpu", torch.bfloat16):
        found = way()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_capped_scores_of_bf16_heads_are_not_rounded() -> None:
    """Scores of 255 and 256.99, whose distance of 1.99 would be 1 or 3 in bf16."""
    query = torch.tensor([15.9375]).view(1, 1, 1, 1).bfloat16()
    key = torch.tensor([16.0, 16.125]).view(1, 1, 2, 1).bfloat16()
    shares = torch.eye(2).view(1, 1, 2, 2).bfloat16()  # values that make the output the weights
    expected = torch.tensor([0.0, 0.5 * 15.9375 * 0.125]).softmax(0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for lowered in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            found = _explicit(query, key, shares, mask, 0.5, 1e5)
        assert (found.float().flatten() - expected).abs().max() < 2**-8, "half a step of bf16"


def test_the_trainer_in_bf16_has_logits_and_values_in_fp32() -> None:
    """What the trainer gives for its own hidden states is exact, as an engine in fp32 gives it."""
    model = tiny_model()
    learner = replace(learner_of(model), compute_dtype=torch.bfloat16)
    critic = ppo_of(learner, tiny_model(seed=1))
    with torch.no_grad():
        critic.head.weight.copy_(_draw(*critic.head.weight.shape, seed=3))
    batch = pack(some_samples(model), device=CPU)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, valued = (hidden_states(m, batch.row) for m in (model, critic.backbone))
    logprobs, entropies = batch_logprobs(learner, model, batch, temperature=1.0)
    every = (hidden.double() @ model.get_output_embeddings().weight.double().T).log_softmax(-1)
    exact = every.gather(1, batch.targets_M[:, None])[:, 0]
    assert (logprobs - exact).abs().max() < 1e-5
    assert (entropies + (every.exp() * every).sum(-1)).abs().max() < 1e-5
    values = valued.double() @ critic.head.weight.double().T + critic.head.bias.double()
    assert (critic.values(learner, batch) - values[:, 0]).abs().max() < 1e-5
