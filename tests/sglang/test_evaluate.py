"""eval.py on the real engine: it reads the checkpoint's folder itself and plays the same games."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
from tiny_run import finished

import eval as door


@pytest.fixture(scope="module")
def run() -> pathlib.Path:
    """A finished warm start."""
    return finished("steps=0", "eval.final_games=16")


@pytest.fixture(scope="module")
def greedy(run: pathlib.Path) -> Any:
    """Its greedy games as the transformers engine played them."""
    return json.loads((run / "held_out_after.json").read_text())["greedy"]


def test_greedy_games_are_those_of_the_transformers_engine(
    run: pathlib.Path, greedy: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--checkpoint", str(run), "--games", "generated", "--out", str(out)]
    settings = ["engine.kind=sglang", "engine.max_cache_tokens=16384"]
    assert door.main([*words, "--temperature", "0", "--temperature", "1", *settings]) == 0
    assert "engine up" in capfd.readouterr().out
    page = json.loads((out / "evaluation.json").read_text())
    assert page["engine"] == "sglang"
    assert page["rows"]["policy, greedy"]["scores"] == greedy["scores"]
    assert page["rows"]["policy, greedy"]["measures"] == greedy["measures"]
    assert len(page["rows"]["policy"]["scores"]) == 16


def test_rows_of_a_matrix_have_an_engine_each_and_partners_stand_beside_it(
    run: pathlib.Path, greedy: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same weights three times: greedy games are those of self-play, whoever has which seat."""
    out = tmp_path / "out"
    for name in ("twin", "partner"):
        shutil.copytree(run / "final", tmp_path / name)
    rows = ["--checkpoint", str(run), "--checkpoint", str(tmp_path / "twin")]
    words = ["--partners", str(tmp_path / "partner"), "--games", "generated", "--temperature", "0"]
    settings = ["engine.kind=sglang", "engine.max_cache_tokens=16384", "--out", str(out)]
    assert door.main([*rows, *words, *settings]) == 0
    assert capfd.readouterr().out.count("engine up") == 2
    cells = json.loads((out / "crossplay.json").read_text())["cells"]
    assert len(cells) == 2 + 2 + 2 * 2
    assert all(cell["scores"] == greedy["scores"] for cell in cells)
