"""These tests run the real vLLM engine; they are skipped where it is not installed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from selfplay.engines.weights import Weights
from selfplay.extras.vllm import VLLMEngine, installed
from selfplay.extras.vllm_options import VLLMOptions
from tests.vllm import tiny

pytest.register_assert_rewrite(
    *(f"tests.helpers.{name}" for name in ("engine_claims", "engine_runs", "pair_claims"))
)
HERE = pathlib.Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process runs whole files (`--dist loadgroup`)."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
            if installed() is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """One engine for several modules: most of a test's time is a start."""
    started = tiny.start(tiny.save(tmp_path_factory.mktemp("model")))
    yield started
    started.close()


@pytest.fixture(scope="session")
def engine_settings() -> VLLMOptions:
    return VLLMOptions(kind="vllm")


@pytest.fixture
def policy(engine: VLLMEngine) -> Any:
    """The model whose weights the engine holds at the start of each test."""
    model = tiny.build()
    engine.load(Weights(model, engine.dtype), engine.version + 1)
    return model
