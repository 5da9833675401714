"""The processes of one grading.

`sandbox` starts the first process, which gets neither code nor tests. It sets up the wall and
forks the other two. The answer's process has the code and a pair of pipes to the tests' process.
The tests' process has the tests and the only descriptor to which a verdict can be written. Both are
behind the wall and isolated from each other.
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
# Usual short names of modules, for tests that use a module without importing it.
_SHORT = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}


def main() -> None:
    """Run one grading. The arguments are the wall, the folder, the descriptors of code and tests,
    and the limits in seconds and bytes."""
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
            os._exit(0)  # do not wait for threads and exit handlers of the answer

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
    if kind != "namespaces":  # with namespaces the files were in memory and are gone already
        empty(folder)
    os._exit(0 if os.read(raised[0], 2) == b".." else NO_WALL)


def watch(grader: int, answer: int, folder: str, *, seconds: float) -> None:
    """Wait until the tests' process ends, then kill the answer's process.

    Kills the tests' process too when the time is over, or when `folder` (unless "") is full. Both
    processes have ended when this returns.
    """
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
    """Confine this process before it reads code or tests. Raises OSError if the host refuses."""
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
    """Close all descriptors above standard error except these."""
    last = 2
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65536)
    for kept in (*sorted(keep), most):
        os.closerange(last + 1, kept)
        last = kept


def hide_streams() -> None:
    """Redirect the standard streams to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def refuse(error: OSError) -> None:
    """End this process before it reads code or tests, and print the reason."""
    os.write(2, f"{error.strerror}\n".encode())
    os._exit(NO_WALL)


def read(descriptor: int) -> str:
    """Read the text of an open descriptor and close it."""
    with open(descriptor, encoding="utf-8") as file:
        return file.read()


def judge(tests: int, pipe: Pipe, verdict: int) -> None:
    """Run the tests on the answer at the other end of the pipe. Write the verdict if all pass."""
    entry_point, _, source = read(tests).partition("\n")
    sys.addaudithook(refuse_pickles)
    if passed(source, Caller(pipe), entry_point=entry_point):
        os.write(verdict, PASSED)


def refuse_pickles(event: str, values: tuple[Any, ...]) -> None:
    """Audit hook that refuses pickles with classes or functions.

    A test that loaded such a pickle from an answer would run the answer's code in this process.
    """
    if event == "pickle.find_class":
        raise PermissionError("refused: a pickle that names a class or a function")


def passed(source: str, caller: Caller, *, entry_point: str) -> bool:
    """Whether all tests pass: the statements, the unittest cases, and the function `check`, if
    defined, on the object named `entry_point`."""
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
    """The names that the tests use but do not define, without Python's builtins."""
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
    """Define the free names of the tests in `space`.

    With an entry point, only its name may be bound to a function or class of the answer; without
    one, any name may. Any name may be bound to a plain value of the answer. Modules are imported
    from their library, never taken from the answer.

    Raises:
        LookupError: if the answer does not define the entry point.
        Gone: if the answer's process ended. Exceptions of the answer are passed on too.
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
