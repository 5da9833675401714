"""Shared code of the benches: writing rows, and groups of games with one prompt."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES
from selfplay.preflight.run import refused


def keep(row: Mapping[str, Any], out: Path | None) -> None:
    """Append the row to the file `out` as one JSON line; do nothing for None."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def show(row: Mapping[str, Any]) -> None:
    """Print the row's names and values on one line."""
    shown = (f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items())
    print(" | ".join(shown), flush=True)


def need_sglang(bench: str, instead: str = "") -> None:
    """End the bench with one line where SGLang is not installed; `instead` says what runs here."""
    if importlib.util.find_spec("sglang") is None:
        missing = "needs SGLang, which is not installed: `pip install -r requirements-gpu.txt`"
        sys.exit(refused(bench, ModuleNotFoundError(missing + instead)))


def group_arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the sizes of groups of samples that share a prompt."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0] if doc else None)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    add("--groups", type=int, default=16)
    add("--group-size", type=int, default=8)
    add("--prompt", type=int, default=640, help="tokens that a group shares")
    add("--own", type=int, default=320, help="mean tokens after the prompt")
    add("--budget", type=int, default=16_384, help="computed tokens of our passes")
    add("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    return parser
