"""The engine's forward pass in the trainer, with torch's operations for the engine's kernels:
what it computes, its gradients, and where it rounds. tests/gpu/test_exact_gpu.py compares bits."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel, Qwen2Config, Qwen3Config

from selfplay.distributed import init_world, shard
from selfplay.extras.exact import (
    Kernels,
    compute_as_engine,
    position_stats,
    why_not_exact,
)
from selfplay.learner.batch import MicroBatch, pack
from selfplay.model.attention import Span, _padded
from selfplay.model.policy import policy_logprobs
from selfplay.preflight.small_copy import eager_logprobs
from tests.helpers.small_updates import group_samples
from tests.helpers.tiny_run import CPU, tiny_model


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight).to(x.dtype)


def _rotate(query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    for x in (query, key):
        a, b = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def _attend(q: Tensor, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    return _padded(q, k, v, span), torch.empty(0)


def _attend_backward(
    grad: Tensor, saved: tuple[Tensor, ...], span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in saved[:3])
        of_q, of_k, of_v = torch.autograd.grad(_padded(q, k, v, span), (q, k, v), grad)
    return of_q, of_k, of_v


TORCH = Kernels(
    matmul=linear,
    norm=_norm,
    rotate=_rotate,
    gate=lambda x: silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
    attend=_attend,
    attend_backward=_attend_backward,
    log_softmax=lambda x: x.log_softmax(-1),
)


def _pair(arch: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A plain model whose norms and biases matter, and the same one as the engine computes it."""
    models = tiny_model(arch), tiny_model(arch)
    for model in models:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    compute_as_engine(models[1], TORCH)
    return models


def _scores(model: PreTrainedModel, batch: MicroBatch) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of a weighted sum of both."""
    both = policy_logprobs(model, batch.row, batch.targets_M, temperature=0.7, entropy_grad=True)
    loss = (both[0] * batch.advantages_M).sum() + 0.1 * both[1].sum()
    return [*both, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_values_and_gradients_are_those_of_transformers(arch: str, recomputed: bool) -> None:
    """On a row with shared prompts, in fp32."""
    plain, exact = _pair(arch)
    batch = pack(group_samples(plain), device=CPU)
    assert batch.row.prefixes is not None
    if recomputed:
        exact.train().gradient_checkpointing_enable({"use_reentrant": False})
    for found, expected in zip(_scores(exact, batch), _scores(plain, batch), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_a_plain_call_reads_each_text_as_one_sequence(arch: str) -> None:
    """As the start check calls it."""
    plain, exact = _pair(arch)
    scores = [eager_logprobs(model, range(3, 40), last=12) for model in (plain, exact)]
    assert (scores[1] - scores[0]).abs().max() < 1e-5


def test_in_bf16_it_rounds_once_where_transformers_rounds_twice() -> None:
    plain, exact = (model.bfloat16() for model in _pair("qwen2"))
    batch = pack(group_samples(plain.float()), device=CPU)
    plain = plain.bfloat16()
    with torch.no_grad():
        found, expected = (
            policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)[0]
            for model in (exact, plain)
        )
    assert not torch.equal(found, expected)
    assert (found - expected).abs().mean() < 0.05
    gradients = _scores(exact, batch)[2:]
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in gradients)


def test_layers_that_are_sharded_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP rounds what a layer is given, which would round the rotary embedding's angles."""
    (plain, alone), (_, sharded) = _pair("qwen2"), _pair("qwen2")
    batch = pack(group_samples(plain), device=CPU)
    monkeypatch.setattr(sys.modules["selfplay.distributed.shard"], "ONE_UNIT", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        world = replace(init_world(device="cpu"), mesh=mesh)
        shard(sharded, world, compute_dtype=torch.bfloat16)
        assert isinstance(sharded.base_model.layers[0], FSDPModule)
        found, expected = (
            policy_logprobs(model, batch.row, batch.targets_M, temperature=0.7)[0]
            for model in (sharded, alone.bfloat16())
        )
        assert torch.equal(found, expected)
    finally:
        dist.destroy_process_group()


def test_logits_are_rounded_before_the_temperature_divides_them() -> None:
    """The logits are 2, and 3 + 2^-8, which bf16 rounds to 3."""
    hidden = torch.tensor([[1.0, 2**-8]]).bfloat16()
    weight = torch.tensor([[2.0, 0.0], [3.0, 1.0]]).bfloat16()
    logprob, entropy, lse = position_stats(hidden, weight, torch.tensor([1]), 0.5, TORCH)
    expected = torch.tensor([4.0, 6.0]).log_softmax(0)
    assert logprob.item() == expected[1].item()
    assert lse.item() == pytest.approx(6.0 - expected[1].item())
    assert entropy.item() == pytest.approx(-(expected.exp() * expected).sum().item())


def test_it_names_what_a_model_must_have() -> None:
    qwen2 = Qwen2Config(hidden_size=128, num_attention_heads=2)
    assert why_not_exact(qwen2) is None
    assert why_not_exact(Qwen3Config(head_dim=128)) is None
    narrow = Qwen2Config(hidden_size=64, num_attention_heads=2)
    assert "a head must be 64 or 128 wide, got 32" in str(why_not_exact(narrow))
    windowed = Qwen2Config(
        hidden_size=128,
        num_attention_heads=2,
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert "full attention" in str(why_not_exact(windowed))
    scaled = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    assert "rope_type must be default, got linear" in str(
        why_not_exact(Qwen3Config(head_dim=128, rope_parameters=scaled))
    )
    other = tiny_model("llama").config
    assert "one of qwen2, qwen3, got llama" in str(why_not_exact(other))
