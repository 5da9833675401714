"""Who imports what: a room only from rooms before it in docs/design.md, a program selfplay before
torch."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.house import ROOMS, ROOT

# A library and the only modules that may import it.
ONLY_IN = {
    "sglang": ("selfplay.engines.sglang", "selfplay.extras.exact"),
    "vllm": "selfplay.extras.vllm",
    "wandb": "selfplay.apps.trackers",
    "tensorboard": "selfplay.apps.trackers",
    "httpx": "selfplay.partners.endpoint",
    "matplotlib": "selfplay.apps.report.charts",
    "starlette": "selfplay.apps.play",
    "uvicorn": "selfplay.apps.play",
}
WITHOUT_TORCH = ("errors", "config", "data", "rollout", "metrics")


def modules(folder: str) -> dict[str, Path]:
    paths = {p.relative_to(ROOT).with_suffix(""): p for p in (ROOT / folder).rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


GAMES = {path.name for path in (ROOT / "dialop").iterdir() if (path / "game.py").exists()}
SELFPLAY, DIALOP = modules("selfplay"), modules("dialop")


@cache
def imports_of(path: Path) -> list[str]:
    """Dotted names of everything the file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(name: str) -> str:
    return name.split(".")[1]


def test_every_room_is_in_the_table_and_every_row_is_a_room() -> None:
    there = {room_of(name) for name in SELFPLAY if name != "selfplay"}
    assert there == set(ROOMS) and len(ROOMS) == len(set(ROOMS))
    top = [path.name for path in (ROOT / "selfplay").glob("*.py") if path.name != "__init__.py"]
    assert len(top) <= 8


def test_a_module_imports_only_from_its_room_and_those_before_it() -> None:
    for name in SELFPLAY.keys() - {"selfplay"}:
        for imported in imports_of(SELFPLAY[name]):
            if imported.startswith("selfplay."):
                before = ROOMS.index(room_of(imported)) <= ROOMS.index(room_of(name))
                assert before, f"{name} imports {imported}"
            assert imported.split(".")[0] not in ("train", "eval", "bench", "tests"), name


def test_extras_are_loaded_by_name_where_something_asks_for_them() -> None:
    """No file outside imports one. Each is named in a text, is a program or serves another extra,
    and each name in a text is a module."""
    extras = {name for name in SELFPLAY if name.startswith("selfplay.extras.")}
    named = set()
    within = {
        name for name in extras if '\nif __name__ == "__main__":' in SELFPLAY[name].read_text()
    }
    for name in extras:
        within |= {one.rpartition(".")[0] for one in imports_of(SELFPLAY[name])}
    outside = [ROOT / "train.py", ROOT / "eval.py", *(ROOT / "bench").glob("*.py")]
    for path in (*SELFPLAY.values(), *DIALOP.values(), *outside):
        if "extras" not in path.parts:
            assert not [one for one in imports_of(path) if one.startswith("selfplay.extras")], path
            named |= set(re.findall(r'"(selfplay\.extras\.\w+)[":]', path.read_text("utf-8")))
    assert named <= extras <= named | within and len(named) > 1


def test_games_know_no_trainer_no_torch_and_no_other_game() -> None:
    for name, path in DIALOP.items():
        for imported in imports_of(path):
            assert imported.split(".")[0] not in ("selfplay", "torch", "transformers"), name
            game, other = (each.split(".")[1:2] for each in (name, imported))
            if game and imported.startswith("dialop.") and game[0] in GAMES:
                assert other == game or other[0] not in GAMES, f"{name} imports {imported}"


def test_no_bridge_is_imported_while_tests_are_collected() -> None:
    """Their libraries take seconds; `tests/extras/conftest.py` imports them."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        libraries = ("selfplay.extras.textarena", "textarena")
        assert not [name for name in imports_of(path) if name.startswith(libraries)], path


def test_a_library_is_imported_only_where_it_belongs() -> None:
    for name, path in SELFPLAY.items():
        for imported in imports_of(path):
            library = imported.split(".")[0]
            assert name.startswith(ONLY_IN.get(library, name)), f"{name} imports {imported}"
            if library == "torch" and name != "selfplay":
                assert room_of(name) not in WITHOUT_TORCH, f"{name} imports {imported}"


ENGINES = {"HFEngine", "SGLangEngine", "EnginePart"}


def asks_which_engine(node: ast.AST) -> bool:
    """An `isinstance` or a cast to an engine's class, or a kind compared with an engine's name."""
    if not isinstance(node, ast.Call | ast.Compare):
        return False
    named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("isinstance", "issubclass", "cast") and bool(named & ENGINES)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        kinds = {each.attr for each in sides if isinstance(each, ast.Attribute)} | named
        words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        return bool(words & {"hf", "sglang"}) and bool(kinds & {"kind", "engine"})
    return False


def test_only_engines_know_which_engine_it_is() -> None:
    """Others ask its class for a property, so that an engine of one's own is as good."""
    for name, path in SELFPLAY.items():
        if not name.startswith("selfplay.engines"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                assert not asks_which_engine(node), f"{name}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize("program", ["train", "eval"])
def test_openmp_is_told_to_sleep_before_torch_reads_it(program: str) -> None:
    code = f"""
import os, sys
class Spy:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.exit(os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Spy())
import {program}
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "passive"


# Words of the games: their names, and what their rules speak of.
WORDS = re.compile(
    rf"\b({'|'.join(sorted(GAMES))}|reviewers?|flights?|calendars?)\b", re.IGNORECASE
)


def test_the_trainer_knows_no_game() -> None:
    """No line of selfplay/, prose and scripts of pages included, names a game of dialop; only the
    settings have one default, on one line. What is extra may serve one game."""
    named = []
    for path in sorted((ROOT / "selfplay").rglob("*.*")):
        if path.suffix not in (".py", ".js", ".j2", ".css") or "extras" in path.parts:
            continue
        name = path.relative_to(ROOT / "selfplay").as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        named += [(name, line.strip()) for line in lines if WORDS.search(line)]
        if path.suffix == ".py":
            games = {part for each in imports_of(path) for part in each.split(".")[1:2]} & GAMES
            assert not games, f"{name} imports {games}"
    ((name, line),) = named
    assert name == "config/play.py" and '"matching"' in line
