"""The one place where a test stops, fails or watches a function of the trainer in a whole run."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any


@contextmanager
def replaced(function: Callable[..., Any], instead: Callable[..., Any]) -> Iterator[None]:
    """Inside, `instead(function, *arguments, **named)` is called in the function's place, wherever
    it was imported to; a method (`Class.method`) in the place of its class's."""
    *classes, name = function.__qualname__.split(".")

    def called(*arguments: Any, **named: Any) -> Any:
        return instead(function, *arguments, **named)

    def put(old: object, new: object) -> None:
        holders: list[Any] = list(sys.modules.values())
        if classes:
            holders = [reduce(getattr, classes, sys.modules[function.__module__])]
        for holder in holders:
            if vars(holder).get(name) is old:
                setattr(holder, name, new)

    put(function, called)
    try:
        yield
    finally:
        put(called, function)  # also where it was imported to meanwhile


@contextmanager
def stopped(
    function: Callable[..., Any],
    call: int = 1,
    by: BaseException | type[BaseException] | signal.Signals = KeyboardInterrupt,
) -> Iterator[list[int]]:
    """Inside, the `call`-th call of the function, from 1, raises this, or sends this signal first;
    0 stops none. Yields the number of calls, as a list of one."""
    num = [0]

    def counted(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        num[0] += 1
        if num[0] == call and isinstance(by, signal.Signals):
            os.kill(os.getpid(), by)
        elif num[0] == call:
            raise by
        return real(*arguments, **named)

    with replaced(function, counted):
        yield num
