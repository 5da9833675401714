"""These tests run the real SGLang engine; they are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.weights import Weights
from tests.sglang import tiny

pytest.register_assert_rewrite("tests.helpers.engine_claims", "tests.helpers.pair_claims")
HERE = pathlib.Path(__file__).resolve().parent
REASON = "the real engine on CPU is not installed here: make test-sglang"


def is_here() -> bool:
    """Whether SGLang (a regular package, not this folder) and the stand-ins can be imported."""
    sglang = importlib.util.find_spec("sglang")
    return (
        sglang is not None
        and sglang.origin is not None
        and importlib.util.find_spec("sgl_kernel") is not None
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plain", action="store_true", help="all engines with engine.fast=false")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--plain"):
        os.environ[tiny.PLAIN], tiny.ENGINE["fast"] = "1", False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A process runs whole files; all that share an engine run in one (`--dist loadgroup`)."""
    shared = {i.path for i in items if "shared_engine" in getattr(i, "fixturenames", ())}
    for item in items:
        name = "shared engine" if item.path in shared else item.path.name
        item.add_marker(pytest.mark.xdist_group(name))
    if config.getoption("--plain"):
        for item in items:
            if item.get_closest_marker("fast_engine") is not None:
                item.add_marker(pytest.mark.skip(reason="needs engine.fast"))
    if not is_here():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """One engine for several modules: most of a test's time is a start."""
    folder = tiny.save(tmp_path_factory.mktemp("model"))
    engine = tiny.start(folder, sessions=tiny.ENGINE["fast"])
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, shared_engine: SGLangEngine) -> SGLangEngine:
    """The shared engine. Games get sessions if the module has `SESSIONS`."""
    shared_engine.sessions = getattr(request.module, "SESSIONS", False)
    return shared_engine


@pytest.fixture(scope="session")
def engine_settings() -> ChosenEngine:
    return ChosenEngine(kind="sglang")


@pytest.fixture
def policy(engine: SGLangEngine) -> Any:
    """The model whose weights the engine holds at the start of each test."""
    model = tiny.build()
    engine.load(Weights(model, engine.dtype), engine.version + 1)
    return model
