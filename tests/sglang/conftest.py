"""These tests run the real engine; without it they are skipped with a reason."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent
REASON = "the real engine on CPU is not installed here: make test-sglang"


def is_here() -> bool:
    """SGLang itself (a regular package, not this folder's name) and the stand-ins on the path."""
    found = importlib.util.find_spec("sglang")
    return (
        found is not None
        and found.origin is not None
        and importlib.util.find_spec("sgl_kernel") is not None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not is_here():
        mine = [item for item in items if HERE in item.path.parents]
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=REASON))
