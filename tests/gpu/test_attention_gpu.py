"""flash-attn-4 on a Hopper GPU errs no more than torch's kernel: heads of real models, and small
models of each family whose layers have windows or capped scores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfplay.advantages.sample import Sample
from selfplay.learner.batch import pack
from selfplay.model.attention import (
    Span,
    _flash,
    _flash_fits,
    _Heads,
    _padded,
    _varlen,
    attention_backend,
)
from selfplay.model.policy import load_model, policy_logprobs
from tests.gpu import small
from tests.helpers.family_models import FAMILIES, random_folder

# Query heads, key heads, width, window, cap of scores.
HEADS = {
    "Qwen2.5-0.5B": (14, 2, 64, None, None),
    "Qwen2.5-1.5B": (12, 2, 128, None, None),
    "Qwen2.5-7B": (28, 4, 128, None, None),
    "Mistral-7B": (32, 8, 128, 200, None),
    "Phi-3-mini": (32, 32, 96, 200, None),
    "DeepSeek-V2": (16, 16, 192, None, None),
    "Gemma-3-1B": (4, 1, 256, 200, None),
    "Gemma-2-2B": (8, 4, 256, 200, 50.0),
}
WINDOWED = sorted(
    {name for name, keys in FAMILIES.items() if "sliding_window" in keys} - {"gpt_oss"}
)


@pytest.fixture(autouse=True)
def flash_attn_4() -> None:
    if attention_backend("cuda", torch.bfloat16) != "flash-attn-4":
        pytest.skip("needs a Hopper GPU and the package flash-attn-4")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("prefix", [0, 640])
@pytest.mark.parametrize("model", HEADS)
def test_heads_of_a_model(model: str, prefix: int) -> None:
    """Output and gradients, against fp64. With a prefix, each segment follows more keys."""
    heads, key_heads, width, window, cap = HEADS[model]
    kind = (torch.device("cuda", 0), torch.bfloat16, heads // key_heads, width)
    if not _flash_fits(_Heads(*kind, window is not None, cap)) and cap is not None:
        pytest.skip("this version of flash-attn-4 does not differentiate capped scores")
    assert _flash_fits(_Heads(*kind, window is not None, cap))
    queries = torch.tensor([290, 1, 777, 64])
    keys = queries + prefix
    bounds = [
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to("cuda", torch.int32)
        for lengths in (queries, keys)
    ]
    span = Span(*bounds, int(queries.max()), int(keys.max()), width**-0.5, window, cap)
    torch.manual_seed(0)
    *inputs, grad = (
        torch.randn(int(lengths.sum()), num, width, device="cuda").bfloat16()
        for lengths, num in (
            (queries, heads),
            (keys, key_heads),
            (keys, key_heads),
            (queries, heads),
        )
    )

    def results(attend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves, span)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact = results(_padded, torch.float64)
    mine, torchs = (
        [distance(a, b) for a, b in zip(results(attend, torch.bfloat16), exact, strict=True)]
        for attend in (_flash, _varlen if cap is None else _padded)
    )
    print(model, prefix, *(f"{a:.1e}/{b:.1e}" for a, b in zip(mine, torchs, strict=True)))
    assert all(a <= 1.05 * b for a, b in zip(mine, torchs, strict=True)), (mine, torchs)


# In a process of its own: liger's RoPE replaces that of every later model of the architecture.
LENGTHS = """
import cutlass.cute as cute
import torch
from selfplay.advantages.sample import Sample
from selfplay.config import ScratchConfig
from selfplay.learner.batch import pack
from selfplay.model.policy import apply_liger, policy_logprobs, scratch_model

compiled, given = [], cute.compile
cute.compile = lambda *words, **named: compiled.append(words[0]) or given(*words, **named)
model = scratch_model(ScratchConfig(width=2048, layers=1, heads=16, kv_heads=2, mlp_width=512,
                                    max_positions=1024, vocab_size=1000), seed=0)
apply_liger(model)
model.to("cuda", torch.bfloat16)
for length in (450, 451, 490):
    before = len(compiled)
    mask = [0] + [1] * (length - 1)
    samples = [Sample(str(k), [5 + k] * length, mask, [], []) for k in range(20)]
    batch = pack(samples, device=torch.device("cuda"), share_prefixes=False)
    policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)[0].sum().backward()
    print(len(batch.row.ids_N), len(compiled) - before)
"""


def test_a_row_of_another_length_is_not_compiled_anew() -> None:
    """In the CuTe DSL, with heads of 128 and more rows of a head than liger needs to choose it."""
    for package in ("liger_kernel", "cutlass"):
        pytest.importorskip(package)
    words = [sys.executable, "-c", LENGTHS]
    done = subprocess.run(
        words, cwd=small.ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [num for num, _ in counts] == ["9000", "9020", "9800"]
    assert [compiled for _, compiled in counts[1:]] == ["0", "0"], done.stdout


@pytest.mark.parametrize("name", WINDOWED)
def test_a_family_with_windows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and gradients of a model in bf16, against transformers' eager pass in fp64. bf16
    layers around attention err too, and not by the same amount each time."""
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "max_position_embeddings": 512,
        "sliding_window": 50,
    }
    if "head_dim" in FAMILIES[name]:
        wide |= {"head_dim": 64, "query_pre_attn_scalar": 64}
    folder = random_folder(name, tmp_path, **wide)
    mine = family_errors(folder, "cuda", torch.bfloat16)
    monkeypatch.setattr("selfplay.model.attention._flash_fits", lambda *heads: False)
    torchs = family_errors(folder, "cuda", torch.bfloat16)
    print(name, *(f"{a:.1e}/{b:.1e}" for a, b in zip(mine, torchs, strict=True)))
    assert all(a <= 1.2 * b for a, b in zip(mine, torchs, strict=True)), (mine, torchs)


def family_errors(folder: Path, device: str, dtype: torch.dtype) -> tuple[float, float]:
    """The relative errors of a packed row's log-probs and of the gradients of their sum."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 60, (num,), generator=generator).tolist() for num in (300, 40, 170)]
    samples = [Sample("text", ids, [0] + [1] * (len(ids) - 1), [], []) for ids in texts]
    batch = pack(samples, device=torch.device(device), share_prefixes=False)
    model = load_model(str(folder), device=device, dtype=dtype).eval()
    seen_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
    seen_M.sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    plain = plain.to(device, torch.float64)
    exact_M = torch.cat([eager_logprobs(plain, ids) for ids in texts])
    exact_M.sum().backward()
    exact = dict(plain.named_parameters())
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert names
    mine, theirs = (
        torch.cat([own[name].grad.double().flatten() for name in names])
        for own in (dict(model.named_parameters()), exact)
    )
    return distance(seen_M.detach(), exact_M.detach()), distance(mine, theirs)


def eager_logprobs(plain: Any, ids: list[int]) -> torch.Tensor:
    text = torch.tensor([ids], device=plain.device)
    logits = plain(text, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
