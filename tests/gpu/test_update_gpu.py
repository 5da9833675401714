"""The update on GPUs: a CPU process's gradients, attention kernels that agree, bounded memory."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.config import ScratchConfig
from selfplay.engines.sglang.weights import SPARE_BYTES, make_room
from selfplay.model.attention import (
    Gather,
    PackedRow,
    Span,
    _padded,
    _varlen,
)
from selfplay.model.logprob import token_logprobs
from selfplay.model.policy import PROGRAMS, fill_the_gpu, policy_logprobs, scratch_model
from selfplay.weight_sync.offload import HostStore
from tests.helpers import processes

ROOT = Path(__file__).resolve().parents[2]
# Processes and how many of them divide each layer.
MESHES = [
    pytest.param(1, 1, id="1", marks=pytest.mark.one_gpu),
    pytest.param(2, 1, id="fsdp2", marks=pytest.mark.two_gpus),
    pytest.param(2, 2, id="tp2", marks=pytest.mark.two_gpus),
    pytest.param(4, 1, id="fsdp4", marks=pytest.mark.four_gpus),
    pytest.param(4, 2, id="fsdp2xtp2", marks=pytest.mark.four_gpus),
]
SHAPE = ScratchConfig(
    width=256, layers=2, heads=4, kv_heads=2, mlp_width=512, max_positions=512, vocab_size=1000
)
LENGTHS = (300, 7, 1, 120)


@pytest.mark.one_gpu
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 896), (70, 64), (40_000, 64), (20_000, 512), (3_000, 3584)]
)
def test_norms_that_fill_the_gpu_have_liger_s_gradients(
    rows: int, width: int, learns: bool
) -> None:
    """Liger's own module, loaded anew, gives the input's gradient bit for bit; the weight's is that
    of fp32."""
    import liger_kernel.ops.rms_norm as wide

    assert wide.__file__ is not None
    spec = spec_from_file_location("liger_s_own", wide.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(own := module_from_spec(spec))
    fill_the_gpu()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert wide.torch.cuda.get_device_properties("cuda").multi_processor_count == PROGRAMS * count
    x, grad = torch.randn(2, rows, width, device="cuda").bfloat16()
    weight = torch.randn(width, device="cuda").bfloat16()
    _, _, rstd, block, warps, mode = own.rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)
    words = (x, weight, rstd, 0.0, mode, block, warps, True, None, learns)
    input_grad, weight_grad = wide.rms_norm_backward(grad.clone(), *words)
    assert torch.equal(input_grad, own.rms_norm_backward(grad.clone(), *words)[0])
    if not learns:
        assert weight_grad is None
        return
    exact = (grad.float() * x.float() * rstd[:, None]).sum(0)
    assert weight_grad is not None and weight_grad.dtype == weight.dtype
    assert (weight_grad.float() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize(("num", "tp"), MESHES)
def test_each_mesh_gives_the_gradients_of_one_cpu_process(
    num: int, tp: int, tmp_path: Path
) -> None:
    words = (str(num), "mesh_worker:on_mesh", str(tp), "cuda", str(tmp_path))
    worker = processes.start(processes.RANKS, *words, torchrun=num)
    output, _ = worker.communicate(timeout=600)
    assert worker.returncode == 0, output[-4000:]
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    for model in ("one unit", "llama False", "qwen3 True"):
        measured = report[model]
        assert measured["logprob"] < 1e-4, (model, measured)
        assert measured["entropy"] < 1e-4, (model, measured)
        assert measured["gradient"] < 1e-4, (model, measured)
        assert measured["norm"] < 1e-5, (model, measured)
        assert measured["values_kept"] == measured["names_kept"] == 1.0
        assert measured["gathered"] == 1.0
    assert report["round trip"]["exported"] == report["round trip"]["loaded"] == 1.0


def test_bf16_packed_scores_are_near_those_of_fp32() -> None:
    model = scratch_model(SHAPE, seed=0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (sum(LENGTHS),), generator=generator)
    predict = torch.cat([torch.arange(299), torch.arange(308, 427)])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)

    def score(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        on = [t.to(device) for t in (ids, positions, bounds)]
        row = PackedRow(*on, max(LENGTHS), predict.to(device))
        with torch.no_grad():
            return policy_logprobs(model, row, ids[predict + 1].to(device), temperature=1.0)

    expected = score("cpu")
    model.to("cuda", torch.bfloat16)
    seen = score("cuda")
    for mine, theirs in zip(seen, expected, strict=True):
        assert (mine.cpu() - theirs).abs().mean() < 0.03


@pytest.mark.parametrize("window", [None, 50])
def test_torchs_kernel_sees_a_shared_prefix(window: int | None) -> None:
    """Queries of 3 segments, keys of 3 sequences; the second and third begin with the first's 100
    tokens."""
    torch.manual_seed(0)
    queries, keys = (150, 30, 60), (150, 130, 160)
    heads = [
        torch.randn(n, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n, h in ((sum(queries), 4), (sum(queries), 2), (sum(queries), 2))
    ]
    paths = [
        torch.arange(150),
        torch.cat([torch.arange(100), torch.arange(150, 180)]),
        torch.cat([torch.arange(100), torch.arange(180, 240)]),
    ]
    tokens = torch.cat(paths).to("cuda")
    bounds = [torch.tensor([0, *n]).cumsum(0).to("cuda", torch.int32) for n in (queries, keys)]
    span = Span(*bounds, max(queries), max(keys), 0.125, window)

    def attend(kernel: Any) -> torch.Tensor:
        return kernel(heads[0], *(Gather.apply(x, tokens) for x in heads[1:]), span)

    outs = [attend(_varlen), attend(_padded)]
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-2, atol=2e-2)
    grads = [torch.autograd.grad(out.float().square().sum(), heads) for out in outs]
    for mine, theirs in zip(*grads, strict=True):
        assert (mine - theirs).float().norm() < 2e-2 * theirs.float().norm()


def test_the_fused_log_prob_on_a_gpu_is_log_softmax() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(5000, 128, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, 5000, (300,), device="cuda")
    for temperature in (1.0, 0.7):
        seen = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=128)
        logits = hidden.float() @ weight.float().t() / temperature
        log_probs = torch.log_softmax(logits, dim=-1)
        expected = log_probs.gather(1, targets[:, None])[:, 0]
        assert (seen[0] - expected).abs().max() < 1e-3
        assert (seen[1] + (log_probs.exp() * log_probs).sum(-1)).abs().max() < 1e-3
        mine = torch.autograd.grad(seen[0].sum(), (hidden, weight))
        theirs = torch.autograd.grad(expected.sum(), (hidden, weight))
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).float().norm() / b.float().norm() < 1e-2


def test_the_log_prob_of_32k_tokens_over_152k_words_stays_under_4_gib() -> None:
    """Forward and backward, above hidden states and weight and their gradients, at 7B's width."""
    hidden = torch.randn(32_768, 3584, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(152_064, 3584, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    weight.requires_grad_()
    targets = torch.randint(0, 152_064, (32_768,), device="cuda")
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, weight, targets, temperature=1.0)[0].sum().backward()
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated() - before) / 2**30 < 4.0


def test_what_waits_on_the_host_leaves_the_gpu_and_comes_back() -> None:
    tensors = [torch.randn(2**20, device="cuda") for _ in range(8)] + [torch.ones(3, device="cuda")]
    before = [tensor.cpu() for tensor in tensors]
    held = torch.cuda.memory_allocated()
    parked = HostStore()
    for _ in range(3):
        parked.offload(tensors)
        assert held - torch.cuda.memory_allocated() >= 8 * 4 * 2**20
        parked.onload()
        assert torch.cuda.memory_allocated() == held
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, before, strict=True))


def test_the_trainer_keeps_its_cache_only_where_the_engine_fits_beside_it() -> None:
    """8 GiB that nobody uses stay for an engine a GiB below the room that is left, and go for one a
    GiB above it."""
    device, kept = torch.device("cuda", 0), 8 * 2**30
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.empty(kept, dtype=torch.uint8, device=device)
    just_fits = torch.cuda.mem_get_info(device)[0] - SPARE_BYTES
    make_room(device, just_fits - 2**30)
    assert torch.cuda.memory_reserved() == held + kept
    make_room(device, just_fits + 2**30)
    assert torch.cuda.memory_reserved() <= held
