"""Which kernel computes packed attention: flash-attn-4 where it runs and gives `_padded`'s numbers,
otherwise torch's. The package is a stand-in here; tests/gpu/test_update_gpu.py has the real one."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfplay.advantages.advantages import imitated
from selfplay.config import ScratchConfig
from selfplay.distributed import init_world
from selfplay.learner.batch import micro_batches
from selfplay.model import attention
from selfplay.model.attention import (
    Span,
    _flash_attn,
    _flash_fits,
    _Heads,
    _padded,
    attention_backend,
)
from selfplay.model.policy import policy_logprobs, scratch_model

CPU, FP32 = torch.device("cpu"), torch.float32
Install = Callable[[Any], None]


CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Puts a function in the place of flash-attn-4's, or an error that its import raises."""
    monkeypatch.setattr(attention, "KERNELS", tmp_path)
    for name in ("ENABLED", "DIR"):
        monkeypatch.setenv(CACHE + name, "")  # so that it is restored
        monkeypatch.delenv(CACHE + name)

    def put(function: Any) -> None:
        class Interface(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if isinstance(function, Exception):
                    raise function
                return function

        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", Interface("interface"))
        _flash_attn.cache_clear()
        _flash_fits.cache_clear()

    yield put
    _flash_attn.cache_clear()
    _flash_fits.cache_clear()


def exact(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, None]:
    """What flash-attn-4 computes, with its arguments and its pair of results."""
    assert given["causal"] and given["window_size"][1] == 0
    back = given["window_size"][0]
    bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
    longest = given["max_seqlen_q"], given["max_seqlen_k"]
    window = None if back is None else back + 1
    span = Span(*bounds, *longest, given["softmax_scale"], window, given["softcap"] or None)
    return _padded(q, k, v, span), None


@pytest.mark.parametrize(
    ("major", "dtype", "function", "kernel"),
    [
        (9, torch.bfloat16, exact, "flash-attn-4"),
        (9, torch.float16, exact, "flash-attn-4"),
        (9, torch.float32, exact, "sdpa"),
        (8, torch.bfloat16, exact, "torch-varlen"),
        (10, torch.bfloat16, exact, "torch-varlen"),
        (9, torch.bfloat16, ModuleNotFoundError("no module"), "torch-varlen"),
        (9, torch.bfloat16, RuntimeError("cutlass 4.8"), "torch-varlen"),
    ],
)
def test_the_kernel_follows_from_gpu_dtype_and_package(
    major: int,
    dtype: torch.dtype,
    function: Any,
    kernel: str,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    install(function)
    assert attention_backend("cuda", dtype) == kernel
    assert attention_backend("cpu", dtype) == "sdpa"


def test_a_package_that_cannot_be_imported_is_named_once(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    install(RuntimeError("cutlass 4.8"))
    for _ in range(3):
        attention_backend("cuda", torch.bfloat16)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("attention: torch's kernel; flash-attn-4")
    assert "cannot be imported" in line and line.endswith("RuntimeError: cutlass 4.8)")


def test_its_kernels_are_kept_where_files_can_be_made(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(attention, "KERNELS", tmp_path / "file" / "kernels")
    install(exact)
    assert _flash_attn() is not None and CACHE + "ENABLED" not in os.environ
    monkeypatch.setattr(attention, "KERNELS", tmp_path / "new" / "kernels")
    install(exact)
    assert _flash_attn() is not None and os.environ[CACHE + "ENABLED"] == "1"
    assert Path(os.environ[CACHE + "DIR"]) == tmp_path / "new" / "kernels"


def no_window(*heads: Any, **given: Any) -> Any:
    return exact(*heads, **{**given, "window_size": (None, 0)})


def no_cap(*heads: Any, **given: Any) -> Any:
    if given["softcap"]:
        raise AssertionError("varlen + score_mod not supported in bwd yet")
    return exact(*heads, **given)


def half_a_gradient(q: Any, k: Any, v: Any, **given: Any) -> Any:
    return exact(q, k, (v + v.detach()) / 2, **given)


def not_a_number(*heads: Any, **given: Any) -> Any:
    return exact(*heads, **given)[0] * torch.nan


@pytest.mark.parametrize(
    ("function", "windowed", "softcap", "why"),
    [
        (exact, False, None, None),
        (exact, True, None, None),
        (exact, True, 2.0, None),
        (no_window, False, None, None),
        (no_window, True, None, "its relative error is 0."),
        (no_cap, True, None, None),
        (no_cap, False, 50.0, "AssertionError: varlen + score_mod not supported in bwd yet"),
        (half_a_gradient, False, None, "its relative error is 0.5"),
        (not_a_number, False, None, "its relative error is nan"),
    ],
)
def test_heads_that_it_does_not_compute_are_torchs(
    function: Any,
    windowed: bool,
    softcap: float | None,
    why: str | None,
    install: Install,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the caller keeps no gradients. The one line names the reason."""
    install(function)
    with torch.no_grad():
        for _ in range(2):
            assert _flash_fits(_Heads(CPU, FP32, 7, 16, windowed, softcap)) == (why is None)
    (line,) = capsys.readouterr().out.splitlines()
    assert "heads of 16, 7 to a key" in line and (", a window" in line) == windowed
    assert ("flash-attn-4, for heads" if why is None else why) in line


@pytest.mark.parametrize(
    ("function", "softcap", "computed_by"),
    [
        (exact, None, "_flash"),
        (exact, 2.0, "_flash"),
        (not_a_number, None, "_varlen"),
        (not_a_number, 2.0, "_padded"),
    ],
)
def test_a_row_is_computed_by_the_kernel_that_fits(
    function: Any,
    softcap: float | None,
    computed_by: str,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(function)
    monkeypatch.setattr(attention, "attention_backend", lambda device, dtype: "flash-attn-4")
    _flash_fits(_Heads(CPU, FP32, 2, 16, False, softcap))  # it calls two of the kernels itself
    calls: list[str] = []
    for name in ("_flash", "_varlen", "_padded"):

        def kernel(query: torch.Tensor, *rest: Any, name: str = name) -> torch.Tensor:
            calls.append(name)
            return torch.zeros_like(query)

        monkeypatch.setattr(attention, name, kernel)
    heads = [torch.randn(1, num, 9, 16) for num in (4, 2, 2)]
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    attention._packed_attention(
        torch.nn.Module(), *heads, None, softcap=softcap, cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds, max_length_q=5, max_length_k=5,
    )  # fmt: skip
    assert calls == [computed_by]


def test_no_gradient_of_a_pass_is_copied_into_zeros() -> None:
    """As an index of the row's batch of one would do, for each of a layer's heads."""
    shape = ScratchConfig(width=32, layers=2, heads=2, kv_heads=2, mlp_width=32, vocab_size=40)
    model = scratch_model(shape, seed=0)
    samples = [imitated("a game", range(20), [0] + [1] * 19, ())]
    ((_, batch),) = micro_batches(samples, init_world(device="cpu"), budget=20)
    calls = set[str]()

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.add(function.name())
            return function(*args, **kwargs or {})

    with Listening():
        logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        logprobs_M.sum().backward()
    assert "aten::mm" in calls and "aten::select_backward" not in calls
