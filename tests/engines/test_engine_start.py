"""What an SGLang engine is started with, and what its start leaves behind. Needs no SGLang."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import pytest

from selfplay.engines.sglang import launch as sglang_start
from selfplay.engines.sglang.launch import child_environment, engine_arguments, free_port

ASKED: dict[str, Any] = {
    "dtype": "bfloat16",
    "tp_size": 2,
    "mem_fraction": 0.7,
    "attention_backend": "triton",
    "context_length": None,
    "max_running_requests": 96,
    "max_total_tokens": None,
    "seed": 3,
    "deterministic": False,
    "base_gpu_id": 4,
    "memory_saver": True,
    "load_format": "auto",
}


def test_a_gpu_engine_starts_without_what_is_known_to_go_wrong() -> None:
    """docs/engine.md says what each of these would do otherwise."""
    given = engine_arguments("folder", device="cuda", **ASKED)
    assert given["disable_prefill_cuda_graph"]
    assert given["disable_custom_all_reduce"]
    assert given["enforce_disable_flashinfer_allreduce_fusion"]
    assert given["sleep_on_idle"]
    assert given["skip_tokenizer_init"]
    assert given["enable_memory_saver"]
    assert given["cuda_graph_max_bs_decode"] == 96
    assert given["random_seed"] == 3
    assert given["base_gpu_id"] == 4
    assert "disable_cuda_graph" not in given
    assert "context_length" not in given, "what is left open is SGLang's to decide"


def test_a_cpu_engine_has_no_graphs_to_capture() -> None:
    given = engine_arguments("folder", device="cpu", **{**ASKED, "memory_saver": False})
    assert given["disable_cuda_graph"]
    assert "cuda_graph_max_bs_decode" not in given


def test_the_deterministic_mode_is_for_gpus() -> None:
    """None of SGLang's CPU attentions is batch-invariant; it would refuse with a list of others."""
    asked = {**ASKED, "deterministic": True}
    assert engine_arguments("folder", device="cuda", **asked)["enable_deterministic_inference"]
    with pytest.raises(ValueError, match=r"engine\.deterministic must be false on a CPU"):
        engine_arguments("folder", device="cpu", **asked)


def test_children_see_a_clean_environment_and_the_trainer_gets_its_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    before, level = dict(os.environ), logging.getLogger().level
    with child_environment("cuda", 2):
        assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
        assert "PYTORCH_ALLOC_CONF" not in os.environ
        assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in os.environ
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # as SGLang does to whoever starts it
        logging.getLogger().setLevel(level + 10)
    assert dict(os.environ) == before
    assert logging.getLogger().level == level


def test_an_engine_s_port_is_free_and_its_neighbours_are_sixteen_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks that start at the same moment must not find the same port."""
    ports = []
    for pid in range(1000, 1008):
        monkeypatch.setattr(sglang_start.os, "getpid", lambda pid=pid: pid)
        ports.append(free_port())
    assert all(abs(a - b) >= 16 for a in ports for b in ports if a != b)
    assert len(set(ports)) >= 6, "something else may hold one of them at this moment"
    assert all(20_000 <= port < 32_000 for port in ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[-1]))
        assert free_port() != ports[-1]
