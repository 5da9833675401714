"""Released weights take real steps on the real engine, with their own tokenizer and template."""

from __future__ import annotations

import pathlib

import pytest

from tests.helpers import processes
from tests.helpers.real_models import check_two_steps, two_steps

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


@pytest.mark.nightly
def test_smollm2_takes_two_steps_on_the_sglang_engine(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    words = two_steps(folder, "engine.kind=sglang", "engine.max_cache_tokens=8192")
    process = processes.start(ROOT / "train.py", *words, path=(STAND_INS,))
    output, _ = process.communicate(timeout=processes.HANG_S)
    assert process.returncode == 0, output[-4000:]
    check_two_steps(folder)
