"""The one place where a test stops, fails or watches a function of the trainer in a whole run."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def replaced(function: Callable[..., Any], instead: Callable[..., Any]) -> Iterator[None]:
    """Inside, `instead(function, *arguments, **named)` is called in the function's place, wherever
    it was imported to; a method (`Class.method`) in the place of its class's."""
    name = function.__name__
    if "." in function.__qualname__:
        owner = sys.modules[function.__module__]
        for part in function.__qualname__.split(".")[:-1]:
            owner = getattr(owner, part)
        holders = [owner]
    else:
        modules = list(sys.modules.values())
        holders = [m for m in modules if vars(m).get(name) is function]

    def called(*arguments: Any, **named: Any) -> Any:
        return instead(function, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for holder in holders:
            patch.setattr(holder, name, called)
        yield


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
