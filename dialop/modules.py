"""Custom modules, by import path (my_package.my_game) or by the path of a .py file.

A run keeps copies of them, by name, in a folder with an index (`KEPT`). A copy and the modules that
it imports are imported by their names below that folder. Python imports one module per name:
another file with that name is accepted if its content is the same, otherwise it is an error.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from dialop.shown import error_line
from dialop.specs import nearest

KEPT = "own_files.json"  # the index in a folder of copies
_PROJECT = Path(__file__).resolve().parents[1]


def own_module(name: str, *, what: str, expected: str) -> ModuleType:
    """The module of this name, or the one in the .py file of this path.

    Raises:
        ValueError: one line that starts with the key `what`, if there is no such module, it cannot
            be imported, or another module with its name is. `expected` gives the valid values and
            the nearest one.
    """
    if name.endswith(".py") or "/" in name:
        return _from_file(name, what)
    is_module = all(part.isidentifier() for part in name.split("."))
    if not is_module or not (name in sys.modules or _exists(name)):
        raise ValueError(f"{what} must be {expected}")
    module = _imported(name, name, what)
    file = getattr(module, "__file__", None)
    # What this project's own module imports is not custom, wherever its packages are installed.
    if file and is_own(Path(file).resolve()):
        _note(own_files(name, Path(file).resolve()), f"{what} {name}")
    return module


def own_files(module: str, file: Path) -> dict[str, Path]:
    """The file of each custom module that this one uses, itself first, by name: its imports, also
    inside functions, and their imports. A module next to it takes precedence. Modules of Python, of
    installed packages and of this project are left out."""
    root = file.parents[len(module.split(".")) - (file.name != "__init__.py")]
    found, todo = {module: file}, [(module, file)]
    while todo:
        name, file = todo.pop()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for each in (*_with_parents(name), *_imports(file, package)):
            used = None if each in found else _file_of(each)
            if used is not None and is_own(used):
                path = root.joinpath(*each.split("."))
                near = (path.with_suffix(".py"), path / "__init__.py")
                found[each] = next((own for own in near if own.is_file()), used)
                todo.append((each, found[each]))
    return {name: file for name, file in found.items() if file.is_file()}


@cache
def imported_digest(file: Path) -> str:
    """The sha256 of a custom file when this process first read it, "" if it was gone."""
    return sha256_of(file) if file.is_file() else ""


def sha256_of(file: str | Path) -> str:
    """The sha256 of a file."""
    with Path(file).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _note(files: dict[str, Path], user: str) -> None:
    """Keep the digests of these files, just after their import. Raises ValueError if this process
    has imported a module with one of their names and other content."""
    for name, file in files.items():
        imported_digest(file)
        had = Path(getattr(sys.modules.get(name), "__file__", None) or file).resolve()
        if had != file and imported_digest(had) != sha256_of(file):
            raise ValueError(
                f"{user} must use files with unique module names, got {file}: {name} is already "
                f"{had}, which differs; rename the file, or restart Python if it imported both"
            )


def _imports(file: Path, package: str) -> Iterator[str]:
    """The full names of the possible imports of a .py file, each after its parent packages."""
    for node in _nodes(file):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".") if node.level else []
            home = above[: len(above) + 1 - node.level] if node.level else []
            names = [".".join(filter(None, (*home, node.module, n.name))) for n in node.names]
        for name in names:
            yield from _with_parents(name)


def texts_in(file: Path) -> Iterator[str]:
    """The string constants of a .py file, such as the name of a file that it reads."""
    for node in _nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _nodes(file: Path) -> Iterator[ast.AST]:
    with suppress(OSError, SyntaxError, ValueError):  # its import reports them
        yield from ast.walk(ast.parse(file.read_bytes() if file.suffix == ".py" else b""))


def _with_parents(name: str) -> Iterator[str]:
    """The parent packages of a module, then the module."""
    parts = name.split(".")
    yield from (".".join(parts[: num + 1]) for num in range(len(parts)))


def _file_of(name: str) -> Path | None:
    """The file of an imported or importable module; None for a standard module and for a name that
    is not a module. Imports nothing."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return Path(file).resolve() if file else None
    top, *parts = name.split(".")
    if top in sys.stdlib_module_names:
        return None
    spec = importlib.machinery.PathFinder.find_spec(top)
    inside = spec.submodule_search_locations if spec else None
    for num, part in enumerate(parts):
        if not inside:
            return None
        below, folders = ".".join((top, *parts[: num + 1])), inside
        try:
            spec = importlib.machinery.PathFinder.find_spec(below, folders)
            inside = spec.submodule_search_locations if spec else None
        except KeyError:  # a folder without __init__.py, whose parent is not imported
            spec, inside = None, [str(Path(folder) / part) for folder in folders]
    return Path(spec.origin).resolve() if spec and spec.has_location and spec.origin else None


def is_own(file: Path) -> bool:
    """Whether a file is not part of Python, of an installed package or of this project."""
    python = Path(importlib.__file__).resolve().parents[1]
    kept = any(file.is_relative_to(_PROJECT / name) for name in ("dialop", "selfplay"))
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not (kept or installed or file.is_relative_to(python))


def _exists(name: str) -> bool:
    """Whether there is a module with this name; False if its parent package is missing."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _from_file(name: str, what: str) -> ModuleType:
    """The module in a .py file.

    Its folder, or the folder of copies, is added to the module path, so that other processes can
    import it by name.
    """
    path = Path(name).resolve()
    if path.suffix != ".py" or not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ValueError(
            f"{what} must be an existing .py file, got {name}{nearest(path.name, near)}"
        )
    copies = next((home for home in path.parents if (home / KEPT).is_file()), None)
    inside = path.relative_to(copies or path.parent)
    parts = (inside.parent if inside.name == "__init__.py" else inside.with_suffix("")).parts
    if not parts or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{what} must be a file that Python can import, got {name}")
    if str(copies or path.parent) not in sys.path:
        # Copies come first: they are what the run imported, wherever the originals were.
        sys.path.insert(0 if copies else len(sys.path), str(copies or path.parent))
    module = _imported(".".join(parts), name, what)
    if not Path(getattr(module, "__file__", None) or "").is_file():
        rule = f"{what} must be a file with a unique module name, got {name}"
        raise ValueError(f"{rule}: {module.__name__} is a part of Python; rename the file")
    _note(own_files(module.__name__, path), f"{what} {name}")
    return module


def _imported(module: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {name} cannot be imported: {error_line(error)}") from error
