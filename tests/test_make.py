"""`make train` with settings among its own words."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_settings_may_be_words_of_make_itself() -> None:
    """Those of make, and what stands in ARGS, are none."""
    words = ["steps=3", "warm_start.teachers=[solo, honest]", "CONFIG=configs/tiny.yaml"]
    words += ["ARGS=seed=1 steps=2 out=x", "PIP_FLAGS=--quiet --no-cache-dir"]
    rule = "say: ; @printf '%s\\n' $(SETTINGS)"
    called = ["make", "--no-print-directory", "--eval", rule, "say", *words]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, env=plain)
    assert sorted(done.stdout.splitlines()) == sorted(words[:2]), done.stderr
