"""eval.py with the real engine plays the same greedy games as the transformers engine."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest

import eval as evaluation
from tests.helpers.tiny_run import finished


@pytest.fixture(scope="module")
def run() -> pathlib.Path:
    """A finished warm start."""
    return finished("steps=0", "eval.final_games=16")


@pytest.fixture(scope="module")
def greedy(run: pathlib.Path) -> Any:
    """That run's greedy games, played by the transformers engine."""
    return json.loads((run / "held_out_after.json").read_text())["greedy"]


def test_each_row_of_a_matrix_has_its_own_engine_and_partners_have_none(
    run: pathlib.Path, greedy: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All three policies have the same weights, so every pairing plays self-play's greedy games, as
    the transformers engine played them."""
    out = tmp_path / "out"
    for name in ("twin", "partner"):
        shutil.copytree(run / "final", tmp_path / name)
    rows = ["--checkpoint", str(run), "--checkpoint", str(tmp_path / "twin")]
    words = ["--partners", str(tmp_path / "partner"), "--games", "generated", "--temperature", "0"]
    settings = ["engine.kind=sglang", "engine.max_cache_tokens=16384", "--out", str(out)]
    assert evaluation.main([*rows, *words, *settings]) == 0
    assert capfd.readouterr().out.count("engine up") == 2
    page = json.loads((out / "evaluation.json").read_text())
    assert page["engine"] == "sglang"
    cells = [page["rows"][cell["row"]] for cell in page["matrix"]["cells"]]
    assert len(cells) == 2 + 2 + 2 * 2
    assert all(cell["scores"] == greedy["scores"] for cell in cells)
