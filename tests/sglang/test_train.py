"""One run of train.py with the real engine that loses it, is killed and is resumed.

Engines that die in a game: test_partners.py, and tests/gpu/."""

from __future__ import annotations

import pathlib

import pytest

from tests.helpers.engine_runs import *  # noqa: F403
from tests.helpers.engine_runs import Interrupted, interrupt
from tests.sglang import tiny

HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = (
    "engine.kind=sglang",
    f"engine.fast={str(tiny.ENGINE['fast']).lower()}",
    "engine.max_cache_tokens=16384",
)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("runs") / "run"
    path = (HERE / "stand_ins",)
    return interrupt(HERE / "interrupted.py", folder, *SETTINGS, engine="sglang::sche", path=path)


@pytest.fixture
def num_processes() -> int:
    """The trainer, the scheduler, the detokenizer and a helper."""
    return 4
