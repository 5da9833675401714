"""These tests run the real SGLang engine; they are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

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
