"""The vLLM engine on a GPU: log-probs, memory that sleeps, pushes by CUDA IPC, a killed process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfplay.engines.base import Request
from selfplay.engines.weights import Weights
from selfplay.errors import EngineFault
from selfplay.extras.vllm import VLLMEngine, installed
from selfplay.extras.vllm_options import VLLMOptions
from tests.gpu import small

pytestmark = pytest.mark.skipif(installed() is None, reason="needs vLLM")
GIB = 2**30
# CUDA graphs for decoding without minutes of compilation.
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """One whose weights are pushed."""
    folder = small.save_config(tmp_path_factory.mktemp("config"))
    settings: dict[str, Any] = {"mem_fraction": 0.2, "max_batch": 64, "server_args": GRAPHS}
    config = VLLMOptions(kind="vllm", **settings)
    started = VLLMEngine(folder, config, context_length=1024, load_format="dummy")
    yield started
    started.close()


@pytest.fixture(scope="module")
def model(engine: VLLMEngine) -> PreTrainedModel:
    return small.build(torch.device("cuda"))


def push(model: PreTrainedModel, engine: VLLMEngine) -> None:
    engine.load(Weights(model, engine.dtype), engine.version + 1)


def num_different(model: PreTrainedModel, engine: VLLMEngine) -> int:
    """How many of the engine's weights differ from the model's bits."""
    compared = engine.compare(Weights(model, engine.dtype))
    assert compared.num_elements >= sum(each.numel() for each in model.parameters())
    return int(compared.num_different)


def test_a_push_changes_every_weight_to_the_trainers_exactly(
    engine: VLLMEngine, model: PreTrainedModel
) -> None:
    push(model, engine)
    assert num_different(model, engine) == 0
    assert small.differences(model, engine).abs().mean() < 0.03
    other = small.build(torch.device("cuda"), seed=1)
    assert num_different(other, engine) > 1e6
    assert small.differences(other, engine).abs().mean() > 0.1
    push(other, engine)
    assert num_different(other, engine) == 0
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight[3, 5] += 1.0
    assert num_different(other, engine) == 1


def test_sleep_gives_memory_back_and_waking_needs_a_push(
    engine: VLLMEngine, model: PreTrainedModel
) -> None:
    push(model, engine)
    awake = small.used_bytes()
    for _ in range(3):
        engine.sleep()
        asleep = small.used_bytes()
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            engine.generate_batch([Request(small.PROMPTS[0], 4, 0)], small.PLAIN)
        with pytest.raises(RuntimeError, match=r"wake \['weights'\] first"):
            push(model, engine)
        engine.wake("weights")
        push(model, engine)
        engine.wake("kv_cache")
        assert num_different(model, engine) == 0
        assert small.differences(model, engine).abs().mean() < 0.03
    assert awake - asleep > 10 * GIB


def test_a_killed_engine_is_a_fault_and_starts_again(
    engine: VLLMEngine, model: PreTrainedModel
) -> None:
    os.kill(engine._children[0].pid, signal.SIGKILL)
    with pytest.raises(EngineFault, match="exit code -9"):
        engine.generate_batch([Request(small.PROMPTS[0], 4, 0)], small.PLAIN)
    engine.restart()
    push(model, engine)
    assert num_different(model, engine) == 0
    assert small.differences(model, engine).abs().mean() < 0.03
