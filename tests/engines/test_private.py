"""The list of SGLang's private names is whole, and the plain engine uses none of them."""

import ast
from pathlib import Path

from selfplay.engines.sglang.fast.private import PRIVATE, missing

ROOT = Path(__file__).resolve().parents[2] / "selfplay"
LISTED = {(f"sglang.srt.{module}", name) for module, names in PRIVATE for name in names.split()}
# What one imports without going into SGLang: its engine's own module, its arguments' names.
FACES = {("sglang.srt.entrypoints", "engine"), ("sglang.srt.server_args", "ServerArgs")}


def imported(path: Path) -> set[tuple[str, str]]:
    """The names that a file imports from below `sglang.srt`, a module as what it holds."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt"):
            found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_every_name_that_is_imported_from_inside_sglang_is_listed() -> None:
    modules = {module for module, _ in LISTED}
    for path in [*ROOT.glob("engines/sglang/**/*.py"), *ROOT.glob("extras/*.py")]:
        for module, name in imported(path) - FACES:
            assert (module, name) in LISTED or f"{module}.{name}" in modules, (path.name, name)


def test_only_the_folder_of_the_fast_engine_imports_from_inside_sglang() -> None:
    others = {path: imported(path) - FACES for path in ROOT.glob("engines/sglang/*.py")}
    assert {path.name for path, names in others.items() if names} == {"processes.py"}


def test_the_first_name_that_is_gone_is_named() -> None:
    """With the standard library in the place of SGLang: `json.decoder` has JSONDecoder, no Gone."""
    there, gone = ("decoder", "JSONDecoder scan_once"), ("decoder", "JSONDecoder Gone")
    assert missing((there,), package="json") is None
    assert missing((there, gone), package="json") == "json.decoder.Gone"
    assert missing((("no_such_part", "x"),), package="json") == "json.no_such_part"
