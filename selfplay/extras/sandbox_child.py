"""The processes inside a sandbox: the grader, which holds the tests, and the answer's.

The grader calls the answer's functions through lines of JSON. Only plain values cross, as copies of
exact types, so no object of an answer reaches the tests and none can override comparisons. The
grader trusts nothing that it reads. The answer's side needs no protection: it can only harm itself.
Uses only the standard library; never imported outside.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

_MAX_LINE_BYTES = 8 * 2**20
# Common short names of modules, for tests that use a module without importing it.
_SHORT = {"np": "numpy", "numpy": "numpy", "pd": "pandas"}
_LIBRARY = sys.stdlib_module_names | set(_SHORT)
# Name: exact type, how to take it apart, how to rebuild it.
_KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, list, lambda *parts: parts),
    "set": (set, list, lambda *parts: set(parts)),
    "frozenset": (frozenset, list, lambda *parts: frozenset(parts)),
    "dict": (dict, lambda v: [list(item) for item in v.items()], lambda *items: dict(items)),
    "bytes": (bytes, lambda v: [v.hex()], bytes.fromhex),
    "complex": (complex, lambda v: [v.real, v.imag], complex),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}
# A value of a derived class is sent as its base.
_BASES: tuple[Callable[[Any], Any], ...] = (str, int, float, list, *_NAMES)

# Exceptions that an answer can raise in its tests: none that ends a loop, skips a test or stops the
# process.
_ERRORS: dict[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception | SystemExit)
}
del _ERRORS["StopIteration"], _ERRORS["StopAsyncIteration"]


def dump(value: Any) -> Any:
    """A plain value as JSON. Iterators and numpy arrays become lists. Raises TypeError for other
    values."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [dump(part) for part in value]
    if kind in _NAMES:
        return {_NAMES[kind]: [dump(part) for part in _KINDS[_NAMES[kind]][1](value)]}
    for base in _BASES:
        if isinstance(value, cast(type, base)):
            return dump(base(value))
    if kind.__module__ == "numpy":
        return dump(value.tolist())
    if hasattr(value, "__next__"):
        return dump(list(value))
    raise TypeError(f"a {kind.__name__} is not a plain value")


def load(data: Any) -> Any:
    """The value written by `dump`. Raises ValueError, TypeError or others for other JSON."""
    if isinstance(data, list):
        return [load(part) for part in data]
    if not isinstance(data, dict):
        return data
    ((name, parts),) = data.items()
    return _KINDS[name][2](*[load(part) for part in parts])


def send(line: io.BufferedRWPair, *message: Any) -> None:
    """Send a message of JSON values to the other process."""
    line.write(json.dumps(message).encode() + b"\n")
    line.flush()


def receive(line: io.BufferedRWPair) -> Any:
    """The next message. Raises EOFError if there is none, ValueError if it is not JSON."""
    data = line.readline(_MAX_LINE_BYTES)
    if not data.endswith(b"\n"):
        raise EOFError("no message, or a value that is too long")
    return json.loads(data)


def call(line: io.BufferedRWPair, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the answer's function. Raises its exception as one of `_ERRORS`; an invalid message may
    raise any of them, but an answer can choose among them anyway."""
    send(line, name, dump(args), dump(kwargs))
    value, error, error_args = receive(line)
    if error is None:
        return load(value)
    raise _ERRORS.get(error, RuntimeError)(*load(error_args))


def serve(line: io.BufferedRWPair) -> None:
    """Run the answer's code at the first call, then call the functions that it defines."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module

    def define(code: str, names: list[str]) -> dict[str, Any]:
        """For each name, whether it is a function, and its value if that is plain."""
        exec(compile(code, "answer.py", "exec"), vars(module))
        found: dict[str, Any] = {}
        for name in names:
            with suppress(Exception):
                value = vars(module)[name]
                found[name] = (True, None) if callable(value) else (False, load(dump(value)))
        return found

    send(line, "ready")
    while True:
        name, args, kwargs = receive(line)
        try:
            function = vars(module)[name] if name else define
            send(line, dump(function(*load(args), **load(kwargs))), None, [])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an answer can raise anything
            error_args: Any = []
            with suppress(Exception):
                error_args = dump(list(error.args))
            known = [kind.__name__ for kind in type(error).__mro__ if kind in _ERRORS.values()]
            send(line, None, known[0] if known else "", error_args)


def verdict_on(tests: str, entry_point: str, *, line: io.BufferedRWPair, code: str | None) -> str:
    """The verdict "passed" or "failed" on the code, or why the tests do not parse.

    Without code every function of the answer raises. With an entry point the answer defines that
    name, and constants that nothing else defines. Without one it defines every name that the tests
    use, except Python's builtins.
    """
    try:
        tree = ast.parse(tests, "tests.py")
        program = compile(tree, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return " ".join(f"its tests do not parse: {str(error) or type(error).__name__}".split())
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    space = vars(module)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
    names = {name for name in used if not name.startswith("__")}
    names |= {entry_point} if entry_point else set()
    try:
        for name in names & _LIBRARY:
            with suppress(ImportError):
                space[name] = importlib.import_module(_SHORT.get(name, name))
        if code is None:
            given = dict.fromkeys([entry_point] if entry_point else names - _LIBRARY, (True, None))
        else:
            given = call(line, "", code, sorted(names))
        for name in names & given.keys():
            is_function, value = given[name]
            if entry_point in ("", name) or not (is_function or name in space):
                function = refuse if code is None else partial(call, line, name)
                space[name] = function if is_function else value
        if entry_point and entry_point not in given:
            return "failed"
        exec(program, space)
        passed = run_cases(space)
        if entry_point and isinstance(space.get("check"), types.FunctionType):
            space["check"](space[entry_point])
    except BaseException:  # noqa: BLE001 - a failing assert, an exit, an answer that is gone
        return "failed"
    return "passed" if passed else "failed"


def refuse(*args: Any, **kwargs: Any) -> None:
    """The stand-in for a function of an answer when the tests themselves are checked."""
    raise NotImplementedError


def run_cases(space: dict[str, Any]) -> bool:
    """Run the unittest cases defined by the tests; returns whether all pass."""
    if "unittest" not in sys.modules:
        return True  # tests that define cases have imported it, which takes a third of a start
    import unittest

    cases = [
        unittest.defaultTestLoader.loadTestsFromTestCase(value)
        for value in space.values()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == "tests"
    ]
    return unittest.TextTestRunner(io.StringIO()).run(unittest.TestSuite(cases)).wasSuccessful()


def main() -> None:
    """Run as the answer's process or, with the descriptor of a job, as the grader. The first
    argument is the folder of packages. Standard input is the connection to the other process,
    standard output takes the verdicts."""
    packages, *job_file = sys.argv[1:]
    sys.path.append(packages)
    sys.set_int_max_str_digits(0)
    line = socket.socket(fileno=os.dup(0)).makefile("rwb")
    verdicts = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # discard all prints
        os.dup2(nowhere, stream)
    if not job_file:
        try:
            serve(line)
        finally:
            os._exit(0)  # do not wait for threads and exit handlers
    with os.fdopen(int(job_file[0]), encoding="utf-8") as file:
        job = json.load(file)
    if job["code"] is not None:
        receive(line)
    os.write(verdicts, b"ready\n")
    for tests, entry_point in job["rows"]:
        verdict = verdict_on(tests, entry_point, line=line, code=job["code"])
        os.write(verdicts, f"{verdict}\n".encode())


if __name__ == "__main__":
    main()
