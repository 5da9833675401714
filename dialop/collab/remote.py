"""Remote calls from the tests' process into the answer's process, as messages of plain values.

Tests call the answer's functions as if they were local. Arguments and results are copies. Functions
and iterators of the answer stay in its process; tests call them or step them through proxies and
get plain values back. No other object of the answer reaches the tests, so an answer cannot pass by
overriding how its objects compare or print. The tests' side trusts nothing that it reads. The
answer's side needs no protection: it can only harm itself.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import operator
import random
import struct
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any, BinaryIO

from dialop.collab.plain import Json, dump, load

ANSWER = "answer"  # name of the module in which the answer's code runs
MAX_MESSAGE_BYTES = 32 * 2**20
_MAX_PRINTED = 2**20
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
# Modules whose functions are sent by name when a test passes one to the answer.
_NAMED = ("builtins", "math", "operator", "_operator")


class Gone(Exception):
    """The other process ended, or sent an invalid message."""


class Pipe:
    """JSON messages over two pipes, each preceded by its length in four bytes."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading: BinaryIO = open(reading, "rb")  # noqa: SIM115 - as long as the process
        self._writing: BinaryIO = open(writing, "wb")  # noqa: SIM115

    def send(self, message: Json) -> None:
        """Send a message. Raises ValueError if it is too long, Gone if the pipe is closed."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value must be at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
        try:
            self._writing.write(struct.pack("I", len(data)) + data)
            self._writing.flush()
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self) -> Json:
        """The next message. Raises Gone if there is none or it is invalid."""
        head = self._reading.read(4)
        if len(head) < 4 or (size := struct.unpack("I", head)[0]) > MAX_MESSAGE_BYTES:
            raise Gone("no message")
        try:
            return json.loads(self._reading.read(size))
        except (ValueError, RecursionError) as error:
            raise Gone(f"no message: {error}") from None


class Remote:
    """Proxy for a function or iterator of the answer, for its tests. Equal only to itself."""

    def __init__(self, caller: Caller, place: int) -> None:
        self._caller = caller
        self._place = place

    def __bool__(self) -> bool:
        raise TypeError("a function or iterator of the answer has no truth value in its tests")


class RemoteFunction(Remote):
    """Proxy for a function, which runs in the answer's process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._caller.ask("call", self._place, args, kwargs)


class RemoteIterator(Remote):
    """Proxy for an iterator, which runs in the answer's process."""

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        return self._caller.ask("next", self._place)


class Caller:
    """The tests' end of the connection."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._functions: list[Callable[..., Any]] = []
        self._seeds: list[Any] = []
        self._watch_seeds("random", random)

    def _watch_seeds(self, name: str, module: Any) -> None:
        """Whenever a test seeds this generator, also seed the one in the answer's process."""
        seed = module.seed

        def seed_both(*args: Any, **kwargs: Any) -> None:
            seed(*args, **kwargs)
            self._seeds.append([name, self._dump([list(args), kwargs])])

        module.seed = seed_both

    def watch_numpy(self) -> None:
        """Do the same for numpy's generator, for tests that use numpy."""
        try:
            module = importlib.import_module("numpy.random")
        except ImportError:
            return
        self._watch_seeds("numpy.random", module)

    def names(self) -> list[str]:
        """Run the answer's code and return the names that it defines, including its imports."""
        names = self.ask("names")
        return [name for name in names if type(name) is str]

    def take(self, name: str) -> Any:
        """The value of a name. Raises LookupError for a module."""
        return self.ask("take", args=(name,))

    def ask(self, what: str, place: int | None = None, args: Any = (), kwargs: Any = None) -> Any:
        """Send a request and return its result. Re-raises the exception of the answer's process."""
        seeds, self._seeds = self._seeds, []
        self._pipe.send([what, place, self._dump([list(args), kwargs or {}]), seeds])
        while True:
            message = self._pipe.receive()
            try:
                kind, value, printed = message
                if kind == "function":  # the answer calls a function that a test passed to it
                    number, given = value
                    self._reply(self._functions[number], self._load(given))
                    continue
                if printed:
                    sys.stdout.write(str(printed)[:_MAX_PRINTED])
                if kind == "value":
                    return self._load(value)
                raised = self._exception(*value)
            except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
                raise Gone(f"no message: {error}") from None
            # Outside `next`, such an exception would silently end a loop in the tests.
            raise raised if what == "next" or not isinstance(raised, _ENDS) else RuntimeError()

    def _reply(self, function: Callable[..., Any], given: Any) -> None:
        args, kwargs = given
        try:
            answer = ["value", self._dump(function(*args, **kwargs)), ""]
        except Exception as error:  # noqa: BLE001 - raised by a test's function; answer may catch it
            answer = ["error", _raised(error, self._dump), ""]
        self._pipe.send(answer)

    def _dump(self, value: Any) -> Json:
        return dump(value, self._dump_other)

    def _dump_other(self, value: Any) -> Json:
        if isinstance(value, Remote):
            return {"back": value._place}
        if getattr(value, "__module__", None) in _NAMED and hasattr(value, "__qualname__"):
            return {"named": [value.__module__, value.__qualname__]}
        if isinstance(value, types.FunctionType | types.MethodType):
            self._functions.append(value)
            return {"function": len(self._functions) - 1}
        raise TypeError(f"a test cannot pass a {type(value).__name__} to an answer")

    def _load(self, data: Json) -> Any:
        return load(data, self._load_other)

    def _load_other(self, name: str, what: Any) -> Any:
        if type(what) is not int:
            raise TypeError("no place")
        match name:
            case "function":
                return RemoteFunction(self, what)
            case "iterator":
                return RemoteIterator(self, what)
            case "back":
                return self._functions[what]
        raise ValueError(f"unknown kind of value: {name}")

    def _exception(self, kinds: Any, args: Any) -> BaseException:
        """An exception like the answer's, of the first of its classes that is imported here.

        unittest's exceptions are excluded, so that an answer cannot skip or stop a test.
        """
        for module, name in kinds:
            known = getattr(sys.modules.get(module), name, None)
            if not isinstance(known, type) or not issubclass(known, Exception | SystemExit):
                continue
            own = known.__module__.partition(".")[0] == "unittest"
            if own or issubclass(known, unittest.SkipTest):
                continue
            made = known.__new__(known)
            made.args = tuple(self._load(args))
            return made
        return RuntimeError("the answer raised an exception that is unknown to its tests")


class Server:
    """The answer's end of the connection. Runs its code and serves the tests' requests."""

    def __init__(self, pipe: Pipe, code: str) -> None:
        self._pipe = pipe
        self._code = code
        self._objects: list[Any] = []
        self._printed = io.StringIO()
        self._space: dict[str, Any] = {}

    def serve(self) -> None:
        """Serve requests until the tests' process ends, then raise Gone."""
        sys.stdout = self._printed
        while True:
            self._answer(self._pipe.receive())

    def _answer(self, message: Json) -> None:
        what, place, given, seeds = message
        try:
            for name, state in seeds:
                args, kwargs = self._load(state)
                importlib.import_module(name).seed(*args, **kwargs)
            args, kwargs = self._load(given)
            on = None if place is None else self._objects[place]
            reply = ["value", self._dump(self._do(what, on, args, kwargs))]
        except Exception as error:  # noqa: BLE001 - the answer's code can raise anything
            reply = ["error", _raised(error, self._dump)]
        except SystemExit as error:
            reply = ["error", _raised(error, self._dump)]
        printed = self._printed.getvalue()[:_MAX_PRINTED]
        self._printed.seek(0)
        self._printed.truncate()
        self._pipe.send([*reply, printed])

    def _do(self, what: str, on: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        match what:
            case "names":
                module = types.ModuleType(ANSWER)
                sys.modules[ANSWER] = module
                self._space = module.__dict__
                exec(compile(self._code, "answer.py", "exec"), self._space)
                return list(self._space)
            case "take":
                if isinstance(self._space[args[0]], types.ModuleType):
                    raise LookupError(f"{args[0]} is a module")
                return self._space[args[0]]
            case "call":
                return on(*args, **kwargs)
        return next(on)

    def _dump(self, value: Any) -> Json:
        return dump(value, self._dump_other, derived_from=ANSWER)

    def _dump_other(self, value: Any) -> Json:
        if isinstance(value, _Function):
            return {"back": value.number}
        kind = "function" if callable(value) else "iterator"
        if kind == "iterator" and not hasattr(value, "__next__"):
            raise TypeError(f"a {type(value).__name__} is not a plain value")
        self._objects.append(value)
        return {kind: len(self._objects) - 1}

    def _load(self, data: Json) -> Any:
        return load(data, self._load_other)

    def _load_other(self, name: str, what: Any) -> Any:
        if name == "back":
            return self._objects[what]
        if name == "named":
            return operator.attrgetter(what[1])(importlib.import_module(what[0]))
        return _Function(self, what)

    def call_back(self, number: int, args: Any, kwargs: Any) -> Any:
        """Call a function of the tests and return its result."""
        self._pipe.send(["function", [number, self._dump([list(args), kwargs])], ""])
        kind, value, _ = self._pipe.receive()
        if kind == "value":
            return self._load(value)
        for module, name in value[0]:
            known = getattr(builtins, name, None) if module == "builtins" else None
            if isinstance(known, type) and issubclass(known, BaseException):
                raise known(*self._load(value[1]))
        raise RuntimeError("a function of the tests raised")


class _Function:
    """Proxy in the answer's process for a function of the tests."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._server.call_back(self.number, args, kwargs)


def _raised(error: BaseException, write: Callable[[Any], Json]) -> Json:
    """An exception's classes, the most specific first, and its arguments as plain values."""
    kinds = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__[:-1]]
    try:
        return [kinds, write(list(error.args))]
    except Exception:  # noqa: BLE001 - the arguments can be any objects, which may fail to convert
        return [kinds, []]
