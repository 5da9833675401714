"""Shared by the benches: model shapes, rows of figures, sizes of groups with one prompt."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# name: width, layers, heads, key/value heads, MLP width, vocabulary, tied embeddings
SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "26M": (512, 8, 8, 8, 1408, 8192, True),  # configs/scratch_h200.yaml, with the benches' words
    "tiny": (64, 2, 4, 2, 128, 8192, True),
}
# Of a step, as selfplay/step/ times them.
STAGES = ("play", "credit", "sleep", "update", "push", "sync_check")


def keep(row: Mapping[str, Any], out: Path | None) -> None:
    """Append the row to the file `out` as one JSON line; do nothing for None."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def show(row: Mapping[str, Any]) -> None:
    """Print the row's names and values on one line."""
    shown = (f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items())
    print(" | ".join(shown), flush=True)


def count(text: str) -> int:
    """A number of at least 1, as the type of an argument."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def last_line(text: str) -> str:
    """The last line of an output that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def ended(bench: str, error: object) -> int:
    """Print the error in one line on stderr; returns the exit status."""
    print(f"bench.{bench}: {error}", file=sys.stderr)
    return 2


def need_sglang(bench: str, instead: str = "") -> None:
    """End the bench with one line where SGLang is not installed; `instead` says what runs here."""
    if importlib.util.find_spec("sglang") is None:
        missing = "needs SGLang, which is not installed: `pip install -r requirements/gpu.txt`"
        sys.exit(ended(bench, missing + instead))


def group_arguments(parser: argparse.ArgumentParser, *, groups: int) -> None:
    """Add the sizes of groups of samples that share a prompt."""
    add = parser.add_argument
    add("--groups", type=int, default=groups, help="groups of samples that share a prompt")
    add("--group-size", type=count, default=8)
    add("--prompt", type=count, default=640, help="tokens that a group shares")
    add("--own", type=int, default=320, help="mean tokens after the prompt")
