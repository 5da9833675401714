"""Files that ship with the project: at the top of a clone, inside selfplay/ once installed."""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str) -> Path:
    """The path of `train.py`, `eval.py` or `configs`, in a clone or in an installed package."""
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name


def find_settings(path: Path) -> Path:
    """`path` if it is a file, else the shipped settings file of that name.

    `tiny`, `tiny.yaml` and `configs/tiny.yaml` all name `configs/tiny.yaml` of the project, from
    any folder. Returns `path` itself if neither exists.
    """
    with suppress(OSError):  # of a name too long: reading it tells
        if path.parent in (Path(), Path("configs")) and (path.is_dir() or not path.exists()):
            named = shipped("configs") / path.name
            for file in (named, named.with_name(f"{path.name}.yaml")):
                if file.is_file():
                    return file
    return path


def nearest_settings(path: Path) -> str:
    """The end of an error line: the shipped settings file whose name is nearest, or ""."""
    names = [file.stem for file in shipped("configs").glob("*.yaml")]
    near = difflib.get_close_matches(path.stem, names, 1)
    return f"; nearest shipped file is {near[0]}" if near else ""
