"""Released weights take real steps with the real engine: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

import processes
from real_models import check_two_steps, two_steps

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).resolve().parent / "stand_ins"


def test_smollm2_takes_two_steps_on_sglang(tmp_path: Path) -> None:
    words = two_steps(tmp_path / "run", "engine.kind=sglang", "engine.max_cache_tokens=16384")
    process = processes.start(ROOT / "train.py", *words, path=(STAND_INS,))
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    check_two_steps(tmp_path / "run")
