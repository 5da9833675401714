"""These tests run the real SGLang engine; they are skipped where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

from selfplay.engines.options import ChosenEngine
from selfplay.engines.sglang import processes
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.weights import Weights
from tests.sglang import tiny

pytest.register_assert_rewrite(
    *(f"tests.helpers.{name}" for name in ("engine_claims", "engine_runs", "pair_claims"))
)
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


class Forked(ForkProcess):
    """A process of SGLang as a fork of the test's own, where a start is a second and not ten:
    SGLang is imported once. The scripts of this folder start theirs as a trainer does."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        body = getattr(self._target, "body", self._target)  # of a `ChildOf`, or SGLang's own
        self.name = body.__name__

    def run(self) -> None:
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        self._target: Any = pickle.loads(
            pickle.dumps(self._target)
        )  # enters, as if it were spawned
        super().run()


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """SGLang reads its environment as it is imported, so that has the one of its processes."""
    with pytest.MonkeyPatch.context() as patch:
        if is_here():
            with processes.child_environment("cpu", 1):
                for name in ("managers.scheduler", "models.registry"):
                    importlib.import_module(f"sglang.srt.{name}")
            patch.setattr(multiprocessing, "Process", Forked)
        yield


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
