"""The installed commands that run train.py and eval.py. pyproject.toml lists all commands."""

from __future__ import annotations

import runpy

from selfplay.config.shipped import shipped


def train() -> None:
    """`selfplay-train …` is `python train.py …`."""
    runpy.run_path(str(shipped("train.py")), run_name="__main__")


def evaluate() -> None:
    """`selfplay-eval …` is `python eval.py …`."""
    runpy.run_path(str(shipped("eval.py")), run_name="__main__")
