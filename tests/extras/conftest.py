"""The bridge under test, imported with its library when the first test asks for it."""

from importlib import import_module
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bridge(request: pytest.FixtureRequest) -> ModuleType:
    """`selfplay.extras.NAME` in `test_NAME.py`."""
    return import_module(f"selfplay.extras.{request.path.stem.removeprefix('test_')}")
