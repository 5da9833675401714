"""What the code weighs and how long a training step is: `python -m tests.helpers.house` prints the
weights, with `--step` the step.

Code lines are without docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tempfile
import threading
import tokenize
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# The rooms of docs/design.md's table in its order, and those that it calls the core.
ROWS = re.findall(
    r"^\| `(\w+)(?:/|\.py)` \|( core)?",
    (ROOT / "docs" / "design.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
ROOMS = [name for name, _ in ROWS]
CORE = {name for name, core in ROWS if core}
EXTRAS = "extras"
TOOLS = ("bench", "docs", "train.py", "eval.py")
# The step that is traced: `configs/talk.yaml` with one layer, four instances of eight games.
STEP: dict[str, Any] = {
    "steps": 3,
    "save_every": 3,
    "device": "cpu",
    "model.scratch.layers": 1,
    "warm_start.num_games": 160,
    "warm_start.epochs": 2,
    "rollout.instances": 4,
    "rollout.group_size": 8,
    "eval.every": 0,
    "eval.num_games": 2,
    "eval.final_games": 2,
    "eval.talk_games": 0,
    "algorithm.minibatches": 1,
}
# A call to which the step's own frames are counted: the first that a seat's move, and the first
# that the engine's copy of the weights, takes.
DEPTHS = {"PolicyPlayer.move": "frames to a move", "HFEngine.update_weights": "frames to weights"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


class File(NamedTuple):
    """What a file of Python holds, by the numbers of lines."""

    code: set[int]
    """The lines that are code."""
    num_docs: int
    """Lines of docstrings, also of those below the fields of a class."""
    functions: list[tuple[int, int]]
    """The first line of each function, decorators included, and its last."""


def read(path: Path) -> File:
    text = path.read_text(encoding="utf-8")
    functions: list[tuple[int, int]] = []
    docs: set[int] = set()
    blocks: list[ast.AST] = [ast.parse(text)]
    while blocks:
        block = blocks.pop()
        if isinstance(block, FUNCTIONS):
            first = min([block.lineno, *(each.lineno for each in block.decorator_list)])
            functions.append((first, block.end_lineno or 0))
        if isinstance(block, DOCUMENTED):
            for statement in block.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str())):
                        docs.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
        for part in BLOCKS:  # a function stands in one of these, in no expression
            blocks += getattr(block, part, ())
    return File(_code_lines(text, docs), len(docs), functions)


def _code_lines(text: str, docs: set[int]) -> set[int]:
    """The lines that no docstring, comment or blank line is."""
    rest = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if n not in docs]
    if not any(line.endswith("\\") or '"""' in line or "'''" in line for _, line in rest):
        return {n for n, line in rest if line and line[0] != "#"}
    # A text of several lines, in which a blank line or one with a # counts.
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docs


def of(folder: str) -> list[Path]:
    path = ROOT / folder
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def weight() -> dict[str, float]:
    """Code lines by room, docstring lines a function, and the settings' keys, leaves only."""
    from selfplay.config import Config
    from selfplay.config.schema import names_of

    by_room: dict[str, int] = {}
    num_docs = num_functions = 0
    for path in of("selfplay") + of("dialop"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = parts[1] if parts[0] == "selfplay" and len(parts) > 1 else parts[0]
        file = read(path)
        by_room[room] = by_room.get(room, 0) + len(file.code)
        num_docs += file.num_docs
        num_functions += len(file.functions)
    tests = sum(len(read(path).code) for path in of("tests"))
    tools = sum(len(read(path).code) for name in TOOLS for path in of(name))
    names = names_of(Config)
    leaves = [name for name in names if not any(n.startswith(f"{name}.") for n in names)]
    trainer = {room: num for room, num in by_room.items() if room != "dialop"}
    return {
        "core": sum(num for room, num in trainer.items() if room in CORE),
        "selfplay": sum(num for room, num in trainer.items() if room != EXTRAS),
        "extras": by_room.get(EXTRAS, 0),
        "dialop": by_room["dialop"],
        "tests": tests,
        "bench": tools,
        "settings": len(leaves),
        "docstring lines a function": round(num_docs / num_functions, 3),
    } | {f"room {room}": num for room, num in trainer.items()}


def step() -> dict[str, float]:
    """What a run's second step executes of `selfplay/`: files, functions, their code lines, and how
    many frames lead from the step to a move, or to the weights, both ends included."""
    import selfplay

    ran: set[tuple[str, int]] = set()
    depths: dict[str, int] = {}
    here = (
        f"{ROOT / 'selfplay'}{os.sep}"  # the rules of a game are its own: draws choose among them
    )

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(here):
            return
        ran.add((code.co_filename, code.co_firstlineno))
        if (name := DEPTHS.get(code.co_qualname)) and name not in depths:
            depth, above = 0, frame
            while above is not None:
                depth += above.f_code.co_filename.startswith(here)
                above = above.f_back
            depths[name] = depth

    with (
        tempfile.TemporaryDirectory() as folder,
        selfplay.start(str(ROOT / "configs" / "talk.yaml"), STEP | {"out": f"{folder}/run"}) as run,
    ):
        run.step()
        threading.setprofile(profile)
        sys.setprofile(profile)
        run.step()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    num_lines = num_functions = 0
    for name in {file for file, _ in ran}:
        file, lines = read(Path(name)), set()
        for first, last in file.functions:
            if (name, first) in ran:
                num_functions += 1
                lines.update(range(first, last + 1))
        num_lines += len(lines & file.code)
    return {
        "files of a step": len({file for file, _ in ran}),
        "functions of a step": num_functions,
        "lines of a step": num_lines,
        **depths,
    }


if __name__ == "__main__":
    found = step() if sys.argv[1:] == ["--step"] else weight()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
