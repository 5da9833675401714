"""eval.py with the real engine plays the same greedy games as the transformers engine."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

import eval as evaluation
from tests.helpers.tiny_run import finished


def test_the_policy_with_a_partner_plays_the_hf_engine_s_greedy_games(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A matrix of two with the same weights: in either seat they play self-play's greedy games, as
    the transformers engine played them. The partner answers in an SGLang engine of its own."""
    run = finished("steps=0", "eval.final_games=16")
    greedy = json.loads((run / "held_out_after.json").read_text())["greedy"]
    out = tmp_path / "out"
    shutil.copytree(run / "final", tmp_path / "partner")
    words = [str(run), "--partners", str(tmp_path / "partner")]
    words += ["--games", "generated", "--temperature", "0", "--out", str(out)]
    assert evaluation.main([*words, "engine.kind=sglang", "engine.max_cache_tokens=16384"]) == 0
    assert capfd.readouterr().out.count("engine up") == 2
    page = json.loads((out / "evaluation.json").read_text())
    assert page["engine"] == "sglang"
    played = [row["scores"] for name, row in page["rows"].items() if "partner" in name]
    assert played == [greedy["scores"]] * 2
