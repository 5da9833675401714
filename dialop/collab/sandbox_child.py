"""The processes of one grading. The first, which `sandbox` starts, sees neither code nor tests: it
raises the wall and forks the two that do.

The answer's process has the code and one pipe to the tests' process, which has the tests and the
only descriptor a verdict can be written to. Both are behind the wall, apart from each other.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import os
import resource
import signal
import sys
import time
import types
import unittest
from collections.abc import Callable
from typing import Any

from dialop.collab import wall
from dialop.collab.folder import empty, is_full
from dialop.collab.remote import Caller, Gone, Pipe, Remote, Server

NO_WALL, PASSED = 3, b"passed"
_POLL_S = 0.005
# What tests call modules that they use without importing them.
_SHORT = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}


def main() -> None:
    """`sandbox` gives the wall, folder, descriptors of code and tests, and limits as words."""
    kind, folder = sys.argv[1:3]
    code, tests = int(sys.argv[3]), int(sys.argv[4])
    seconds, memory_bytes = float(sys.argv[5]), int(sys.argv[6])
    verdict = os.dup(1)
    to_answer, to_tests, raised = os.pipe(), os.pipe(), os.pipe()
    os.chdir(folder)
    try:
        if kind == "namespaces":
            wall.enter_namespaces(folder)
    except OSError as error:
        refuse(error)

    def start(run: Callable[[], None], *keep: int) -> int:
        child = os.fork()
        if child:
            return child
        try:
            close_all_but(raised[1], *keep)
            raise_wall(kind, folder, seconds=seconds, memory_bytes=memory_bytes)
        except OSError as error:
            refuse(error)
        os.write(raised[1], b".")
        os.close(raised[1])
        hide_streams()
        try:
            run()
        finally:
            os._exit(0)  # threads and exit handlers of the answer are not waited for

    grader = start(
        lambda: judge(tests, Pipe(to_tests[0], to_answer[1]), verdict),
        *(tests, to_tests[0], to_answer[1], verdict),
    )
    try:
        if kind == "namespaces":
            wall.new_processes()
    except OSError as error:
        refuse(error)
    answer = start(
        lambda: Server(Pipe(to_answer[0], to_tests[1]), read(code)).serve(),
        *(code, to_answer[0], to_tests[1]),
    )
    close_all_but(raised[0])
    watch(grader, answer, folder if kind == "landlock" else "", seconds=seconds)
    if kind != "namespaces":  # whose files are gone with them
        empty(folder)
    os._exit(0 if os.read(raised[0], 2) == b".." else NO_WALL)


def watch(grader: int, answer: int, folder: str, *, seconds: float) -> None:
    """Wait for the tests' end, then end the answer; both at once when the time is over or where
    `folder`, if one is given, is full. Neither is there any more after this."""
    end = time.monotonic() + seconds
    while not os.waitpid(grader, os.WNOHANG)[0]:
        if time.monotonic() > end or (folder and is_full(folder)):
            os.kill(grader, signal.SIGKILL)
            os.waitpid(grader, 0)
            break
        time.sleep(_POLL_S)
    os.kill(answer, signal.SIGKILL)
    os.waitpid(answer, 0)


def raise_wall(kind: str, folder: str, *, seconds: float, memory_bytes: int) -> None:
    """All that a process does before it reads code or tests. Raises OSError where it cannot."""
    apart = kind == "namespaces"
    wall.limit(seconds=seconds, memory_bytes=memory_bytes, own_users=apart)
    if kind == "none":
        return
    wall.die_with_parent()
    if not apart:
        wall.landlock(folder)
    wall.drop_rights()
    wall.seccomp(own_files=apart)


def close_all_but(*keep: int) -> None:
    """Close every descriptor above standard error but these."""
    last = 2
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65536)
    for kept in (*sorted(keep), most):
        os.closerange(last + 1, kept)
        last = kept


def hide_streams() -> None:
    """Have the standard streams lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def refuse(error: OSError) -> None:
    """End this process, before it has read anything, and say why."""
    os.write(2, f"{error.strerror}\n".encode())
    os._exit(NO_WALL)


def read(descriptor: int) -> str:
    """The text of an open file, which is closed."""
    with open(descriptor, encoding="utf-8") as file:
        return file.read()


def judge(tests: int, pipe: Pipe, verdict: int) -> None:
    """Run the tests on the answer that the pipe leads to; write the verdict when all pass."""
    entry_point, _, source = read(tests).partition("\n")
    sys.addaudithook(refuse_pickles)
    if passed(source, Caller(pipe), entry_point=entry_point):
        os.write(verdict, PASSED)


def refuse_pickles(event: str, values: tuple[Any, ...]) -> None:
    """Keep tests from loading a pickle that an answer wrote, which would run its code here."""
    if event == "pickle.find_class":
        raise PermissionError("refused: a pickle that names a class or a function")


def passed(source: str, caller: Caller, *, entry_point: str) -> bool:
    """Whether the tests pass: their statements, their unittest cases, and `check` where they define
    it, on what `entry_point` names."""
    tree = ast.parse(source, "tests.py")
    if "numpy" in source:
        caller.watch_numpy()
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    space = module.__dict__
    try:
        take_names(space, free_names(tree), caller, entry_point=entry_point)
        exec(compile(tree, "tests.py", "exec"), space)
        cases = [
            value
            for value in space.values()
            if isinstance(value, type)
            and issubclass(value, unittest.TestCase)
            and value.__module__ == "tests"
        ]
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        if entry_point and callable(space.get("check")) and not isinstance(space["check"], Remote):
            space["check"](space[entry_point])
    except BaseException:  # noqa: BLE001 - a failing assert, an exit, an answer that is gone
        return False
    return result.wasSuccessful()


def free_names(tree: ast.Module) -> set[str]:
    """The names that the tests use and define nowhere, without the builtin ones."""
    used, bound = set(), set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=short):
                bound.add(short or name.partition(".")[0])
    return used - bound


def take_names(space: dict[str, Any], free: set[str], caller: Caller, *, entry_point: str) -> None:
    """Give the tests what they use and do not define.

    Functions and classes come from the answer under the name of the entry point alone, or, where
    there is none, under any. Plain values come under any name; modules come from their library.
    Raises Gone or what the answer raises; LookupError for an entry point that it does not define.
    """
    there = set(caller.names())
    if entry_point:
        space[entry_point] = caller.take(entry_point) if entry_point in there else None
        if space[entry_point] is None:
            raise LookupError(f"no {entry_point}")
    for name in free - {entry_point}:
        if name in there:
            try:
                value = caller.take(name)
            except Gone:
                raise
            except LookupError:  # a module
                pass
            else:
                if not entry_point or not isinstance(value, Remote):
                    space[name] = value
                continue
        try:
            space[name] = importlib.import_module(_SHORT.get(name, name))
        except (ImportError, ValueError):
            continue
