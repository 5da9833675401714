"""Modules of one's own, by import path (my_package.my_game) or by the path of a .py file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from dialop.shown import error_line
from dialop.specs import nearest


def own_module(name: str, *, what: str, expected: str) -> ModuleType:
    """The module of this name, or the one in the .py file of this path.

    Raises:
        ValueError: one line that begins with the key `what`, if there is no such module or it
            cannot be imported. `expected` says what the key takes, and what is nearest.
    """
    if name.endswith(".py") or "/" in name:
        return _from_file(name, what)
    if not all(part.isidentifier() for part in name.split(".")) or not _exists(name):
        raise ValueError(f"{what} must be {expected}")
    return _imported(name, name, what)


def _exists(name: str) -> bool:
    """Whether there is a module of this name; False if its parent package is missing."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _from_file(name: str, what: str) -> ModuleType:
    """The module in a .py file.

    Its folder joins the module path, so that other processes can import it by its name.
    """
    path = Path(name).resolve()
    if path.suffix != ".py" or not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ValueError(
            f"{what} must be an existing .py file, got {name}{nearest(path.name, near)}"
        )
    if not path.stem.isidentifier():
        raise ValueError(f"{what} must be a file that Python can import, got {name}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = _imported(path.stem, name, what)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise ValueError(
            f"{what} must be a file whose name no other module has, got {name}: "
            f"{path.stem} is {found or 'a part of Python'}; rename the file"
        )
    return module


def _imported(module: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"{what} {name} cannot be imported: {error_line(error)}") from error
