"""These tests run the real SGLang engine; they are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.weight_sync import push as sync
from tests.sglang import tiny

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not is_here():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """The engine of all modules without settings of their own: most of a test's time is a start."""
    engine = SGLangEngine(tiny.save(tmp_path_factory.mktemp("model")), **tiny.ENGINE, sessions=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[SGLangEngine]:
    """A module's engine of the tiny model. The module's `SETTINGS` go above `tiny.ENGINE`; without
    them its `SESSIONS` says whether games get sessions."""
    settings = getattr(request.module, "SETTINGS", {})
    if not settings:
        engine = request.getfixturevalue("shared_engine")
        engine.sessions = getattr(request.module, "SESSIONS", False)
        yield engine
        return
    folder = request.getfixturevalue("tmp_path_factory").mktemp("model")
    engine = SGLangEngine(tiny.save(folder), **tiny.ENGINE | settings)
    yield engine
    engine.close()


@pytest.fixture
def policy(engine: SGLangEngine) -> Any:
    """The model whose weights the engine holds at the start of each test."""
    model = tiny.build()
    sync.push(model, engine, version=engine.version + 1, dtype=engine.dtype)
    return model
