"""The installed commands: each runs the file or the module that a clone runs by its name."""

from __future__ import annotations

import runpy

from selfplay.config.shipped import shipped


def train() -> None:
    """`selfplay-train …` is `python train.py …`."""
    runpy.run_path(str(shipped("train.py")), run_name="__main__")


def evaluate() -> None:
    """`selfplay-eval …` is `python eval.py …`."""
    runpy.run_path(str(shipped("eval.py")), run_name="__main__")


def report() -> None:
    """`selfplay-report …` is `python -m selfplay.report …`."""
    runpy.run_module("selfplay.report", run_name="__main__", alter_sys=True)


def publish() -> None:
    """`selfplay-publish …` is `python -m selfplay.publish …`."""
    runpy.run_module("selfplay.publish", run_name="__main__", alter_sys=True)


def serve() -> None:
    """`selfplay-serve …` is `python -m selfplay.serve …`."""
    runpy.run_module("selfplay.serve", run_name="__main__", alter_sys=True)


def play() -> None:
    """`selfplay-play …` is `python -m selfplay.play …`."""
    runpy.run_module("selfplay.play", run_name="__main__", alter_sys=True)
