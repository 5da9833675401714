"""Tests which one-line faults in the code of a step the tests detect.

    python -m bench.mutants --jobs 14 --out mutants.jsonl

Each mutant changes one place: thirteen by hand (NAMED), and others drawn by a named seed from the
lines of the core that a training step executes. The kinds are a comparison or its boundary, an
operator, a number, a removed statement, a negated condition, two swapped arguments. Each kind is
drawn equally often, and a line at most once.

A mutant is written into a copy of the tree. The tests of its room run first, then the tests of a
step (NEXT), and the fast set on the survivors. Results are lines of `--out`, written one by one:
the same command continues where it stopped. First the fast set runs on the unchanged tree; a test
that fails there is reported and left out. At the end all results are printed as a table, with the
share of caught mutants.

The tests need what `make test` sets up: its environment, which also runs this, and `models/`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from bench.rows import count, ended, keep
from selfplay.data.seeds import named_seed

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("selfplay", "dialop", "bench", "configs", "examples", "docs", "tests", "requirements")
LINKED = ("models", ".venv")
# Rooms whose tests are not in the folder of their name.
TESTS = {
    "step": ("tests/test_one_step.py", "tests/methods", "tests/api"),
    "setup": ("tests/api", "tests/run/test_resume.py"),
    "checkpoint": ("tests/checkpoint", "tests/run/test_resume.py"),
    "warm_start": ("tests/run/test_warm_start.py",),
    "atomic": ("tests/run/test_atomic.py",),
    "advantages": ("tests/advantages", "tests/rollout/test_branches.py"),
    "errors": ("tests/test_shown.py",),
}
NEXT = ("tests/test_one_step.py", "tests/run/test_resume.py")
FAST = ("tests", "--ignore", "tests/sglang", "--ignore", "tests/vllm", "--ignore", "tests/gpu")
UNCHANGED = "the tree as it is"
# A traced step has branches, moves that are paid, several minibatches and a reference.
STEP: dict[str, Any] = {
    "steps": 3,
    "device": "cpu",
    "model.scratch.layers": 1,
    "warm_start.num_games": 640,
    "reward.function": "message_credit",
    "rollout.instances": 4,
    "rollout.play": "branches",
    "rollout.options": {"turns": "first", "siblings": 2},
    "algorithm.minibatches": 2,
    "algorithm.epochs": 2,
    "eval.every": 0,
    "eval.final_games": 2,
    "eval.talk_games": 0,
}


@dataclass(frozen=True)
class Mutant:
    """In `file`, the text from `start` to `end`, as offsets of characters, becomes `new`."""

    name: str
    kind: str
    file: str
    line: int
    start: int
    end: int
    new: str

    def written(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def change(self, text: str) -> str:
        """The old and the new text, on one line."""
        old = text[self.start : self.end]
        return " → ".join(" ".join(part.split())[:60] for part in (old, self.new))


# Hand-overs that no test held once: name, file, text, its mutant.
NAMED = (
    ("rate to optimizer", "selfplay/learner/update.py", 'group["lr"] = lr', "pass"),
    (
        "own move's reward",
        "selfplay/advantages/branches.py",
        "number < point.turn",
        "number <= point.turn",
    ),
    (
        "variance of moves",
        "selfplay/advantages/advantages.py",
        "((one.mean - mean) ** 2 + one.variance) for one in batch",
        "((one.mean - mean) ** 2) for one in batch",
    ),
    (
        "part of an instance",
        "selfplay/methods/resample.py",
        "math.ceil((num_wanted",
        "math.floor((num_wanted",
    ),
    ("first mismatch", "selfplay/learner/update.py", "per_step[:1]", "per_step[-1:]"),
    (
        "names to comparison",
        "selfplay/weight_sync/supervised.py",
        "[*weights][version % len(weights)]",
        "[*weights][0]",
    ),
    (
        "turns to scorer",
        "selfplay/weight_sync/sync_check.py",
        "turns[FIRST_TURNS * num :][: RECHECK_TURNS * num]",
        "turns[: RECHECK_TURNS * num]",
    ),
    ("turns to floor", "selfplay/weight_sync/sync_check.py", "self._add_to_floor(first)", "pass"),
    (
        "largest cell",
        "dialop/matching/board.py",
        "0 <= cell < self.max_value",
        "0 <= cell <= self.max_value",
    ),
    (
        "order of epochs",
        "selfplay/learner/update.py",
        '"minibatches", step, epoch)',
        '"minibatches", step)',
    ),
    (
        "averages to resume",
        "selfplay/step/run.py",
        '"baselines": dict(self.baselines)',
        '"baselines": {}',
    ),
    (
        "pool to go back to",
        "selfplay/step/ending.py",
        '{"partners": {"pool": own["partners"]["pool"]}}',
        '{"partners": policy.partners.state()}',
    ),
    (
        "best to go back to",
        "selfplay/metrics/monitors.py",
        "series.best_saved, series.best_step = mean, step",
        "series.best_saved, series.best_step = mean, step - 1",
    ),
)


def named() -> list[Mutant]:
    """The mutants of NAMED whose text the tree has; the others are reported on stderr."""
    found = []
    for name, file, old, new in NAMED:
        text = (ROOT / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            ended("mutants", f"{name}: {file} must have {old!r} once, got {text.count(old)}")
            continue
        start = text.index(old)
        line = text.count("\n", 0, start) + 1
        found.append(Mutant(name, "hand-over", file, line, start, start + len(old), new))
    return found


# --- drawn mutants --------------------------------------------------------------------------------

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
Place = tuple[str, int, ast.AST, str]  # kind, line, node, its new text


def places(tree: ast.Module) -> Iterator[Place]:
    """Every change of one kind in a module, without those in texts and annotations."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.JoinedStr | ast.Raise):
            parts.append(node)
        for part in filter(None, parts):
            skipped.update(id(each) for each in ast.walk(part))
    for node in ast.walk(tree):
        if id(node) not in skipped:
            yield from ((kind, getattr(node, "lineno", 0), at, new) for kind, at, new in of(node))


def of(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The changes of one node: kind, what is replaced, by what text."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARED:
            ops = [COMPARED[type(op)](), *node.ops[1:]]
            yield "comparison", node, unparsed(ast.Compare(node.left, ops, node.comparators))
        case ast.BinOp() if type(node.op) in OPERATORS:
            other = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            yield "operator", node, unparsed(other)
        case ast.Constant(value=(int() | float()) as value) if not isinstance(value, bool):
            yield "number", node, repr(value + 1)
            yield "number", node, f"({value - 1!r})"
        case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "statement", node, "pass"
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition", node.test, f"not ({unparsed(node.test, bare=True)})"
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            if not isinstance(second, ast.Starred):
                swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
                yield "arguments", node, unparsed(swapped)


def unparsed(node: ast.AST, *, bare: bool = False) -> str:
    """An expression in brackets, as it may stand in another."""
    text = ast.unparse(node)
    return text if bare else f"({text})"


def drawn(lines: dict[str, set[int]], num: int, *, seed: int) -> list[Mutant]:
    """`num` mutants on these executed lines by file; more are drawn after fewer."""
    rng, by_kind = random.Random(named_seed("mutants", seed)), dict[str, list[Mutant]]()
    for file in sorted(lines):
        text = (ROOT / file).read_text(encoding="utf-8")
        starts = [0]
        for row in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(row))
        rows = text.splitlines()

        def offset(row: int, column: int, starts: Any = starts, rows: Any = rows) -> int:
            return starts[row - 1] + len(rows[row - 1].encode()[:column].decode())

        for kind, line, node, new in places(ast.parse(text)):
            if line in lines[file]:
                at: Any = node
                start = offset(at.lineno, at.col_offset)
                end = offset(at.end_lineno, at.end_col_offset)
                by_kind.setdefault(kind, []).append(Mutant("", kind, file, line, start, end, new))
    for mutants in by_kind.values():
        rng.shuffle(mutants)
    chosen, taken = list[Mutant](), set[tuple[str, int]]()
    kinds = sorted(by_kind)
    while len(chosen) < num and any(by_kind.values()):
        kind = kinds[len(chosen) % len(kinds)]
        while by_kind[kind]:
            mutant = by_kind[kind].pop()
            if (mutant.file, mutant.line) not in taken:
                break
        else:
            kinds.remove(kind)
            continue
        taken.add((mutant.file, mutant.line))
        name = f"drawn {len(chosen) + 1:03d}"
        chosen.append(Mutant(name, *list(asdict(mutant).values())[1:]))
    return chosen


def executed() -> dict[str, set[int]]:
    """The lines of the core's files that the second step of a run executes."""
    import selfplay
    from selfplay.config import load_config

    core = re.findall(
        r"^\| `(\w+(?:/|\.py))` \| core",
        (ROOT / "docs" / "design.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    folders = tuple(str(ROOT / "selfplay" / name) for name in core)
    lines: dict[str, set[int]] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(folders):
            return None
        if event == "line":
            lines.setdefault(str(Path(file).relative_to(ROOT)), set()).add(frame.f_lineno)
        return trace

    with tempfile.TemporaryDirectory() as folder:
        words = [f"{key}={value}" for key, value in STEP.items()]
        config = load_config(ROOT / "configs" / "talk.yaml", [*words, f"out={folder}/run"])
        with selfplay.start(config) as run:
            run.step()
            threading.settrace(trace)
            sys.settrace(trace)
            run.step()
            sys.settrace(None)
            threading.settrace(None)
    return lines


# --- runs -----------------------------------------------------------------------------------------


def nearest(file: str) -> tuple[str, ...]:
    """The tests of a file's room, then the tests of a step."""
    first, second, *_ = Path(file).with_suffix("").parts
    room = second if first == "selfplay" else first
    return TESTS.get(room, (f"tests/{room}",))


def tested(tree: Path, words: Sequence[str], limit_s: float) -> list[str]:
    """The tests among these that fail, or why pytest ended without one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    flags = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not load")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *flags, *words],
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return [f"no end in {limit_s:.0f} s: {' '.join(words)}"]
    if process.returncode in (0, 5):  # 5: no test
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return failed or [said.strip().splitlines()[-1][:200]]


def result_of(
    tree: Path, mutant: Mutant, left_out: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Write the mutant, run its tests up to the first that fails, write the file back."""
    path, began_s = tree / mutant.file, time.monotonic()
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.written(text), encoding="utf-8")
    by: list[str] = []
    without = [f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in left_out]
    try:
        for words in (nearest(mutant.file), NEXT, FAST):
            by = by or tested(tree, ["-x", *words, *without], limit_s)
    finally:
        path.write_text(text, encoding="utf-8")
    return {
        "name": mutant.name,
        "kind": mutant.kind,
        "where": f"{mutant.file}:{mutant.line}",
        "change": mutant.change(text),
        "caught_by": by[0] if by else "",
        "seconds": round(time.monotonic() - began_s),
    }


def copied(folder: Path) -> Path:
    """A copy of the tree that a mutant may change."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
        elif path.name in (*LINKED, ".ci", ".github"):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each mutant, survivors first, and the share that was caught."""
    ordered = sorted(rows, key=lambda row: (bool(row["caught_by"]), row["name"]))
    lines = [
        f"| {row['name']} | {row['kind']} | {row['where']} | `{row['change']}` | "
        f"{row['caught_by'] or '**survives**'} | {row['seconds']} |"
        for row in ordered
    ]
    num = sum(bool(row["caught_by"]) for row in rows)
    kinds = Counter(row["kind"] for row in rows if not row["caught_by"])
    survive = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none"
    head = ["| mutant | kind | where | change | caught by | seconds |", "|---|---|---|---|---|--:|"]
    end = f"\ncaught {num} of {len(rows)}, {num / max(1, len(rows)):.1%}; survivors: {survive}"
    return "\n".join([*head, *lines, end])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.mutants", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a .jsonl file of results, which is continued")
    add("--jobs", type=count, default=1, help="mutants at once, each in a copy of the tree")
    add("--num", type=int, default=150, help="drawn mutants, in addition to NAMED")
    add("--seed", type=int, default=0, help="seed of the draw")
    add("--limit", type=float, default=1800.0, help="seconds of a pytest, after which it is caught")
    options = parser.parse_args(words)
    done = [json.loads(line) for line in options.out.open()] if options.out.exists() else []
    mutants = named() + (drawn(executed(), options.num, seed=options.seed) if options.num else [])
    names = {mutant.name for mutant in mutants}
    left = [mutant for mutant in mutants if mutant.name not in {row["name"] for row in done}]
    with tempfile.TemporaryDirectory() as home:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(copied(Path(home) / str(number)))
        before = [row["failing"] for row in done if row["name"] == UNCHANGED]
        if left and not before:
            tree = trees.get()
            before = [tested(tree, [*FAST, "-n", f"{options.jobs}"], options.limit)]
            trees.put(tree)
            keep({"name": UNCHANGED, "failing": before[0]}, options.out)
            for test in before[0]:
                print(f"left out, it fails on {UNCHANGED}: {test}", flush=True)
        lock = threading.Lock()

        def run(mutant: Mutant) -> None:
            tree = trees.get()
            row = result_of(tree, mutant, before[0], options.limit)
            trees.put(tree)
            with lock:
                keep(row, options.out)
                done.append(row)
                print(f"{row['name']}: {row['caught_by'] or 'SURVIVES'}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, left))
    print(table([row for row in done if row["name"] in names]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
