"""A run and its engines share the process's signal handlers."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from dialop.terminal import ENDING
from selfplay.engines.sglang.processes import Signals


@pytest.fixture(autouse=True)
def as_a_program_begins() -> Iterator[None]:
    """No signal is ignored, as some are in a test that nohup has started, or handled."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_reach_every_taker_and_come_back_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run, two engines, and the restart of the one that started first. No child ends, as if one
    hangs: each engine is told."""
    handled = (signal.SIGTERM, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in handled]
    told: list[str] = []
    run, first, second = Signals(), Signals(), Signals()
    run.take()
    monkeypatch.setattr("selfplay.engines.sglang.processes.ENDS_S", 0.1)
    first.take(lambda: told.append("first"))
    second.take(lambda: told.append("second"))
    os.kill(os.getpid(), signal.SIGQUIT)
    assert told == ["first", "second"]
    first.restore()
    again = Signals()
    again.take(lambda: told.append("again"))
    second.restore()
    os.kill(os.getpid(), signal.SIGQUIT)
    assert told[2:] == ["again"]
    again.restore()
    # Without an engine SIGQUIT ends the program too.
    assert signal.getsignal(signal.SIGQUIT) == signal.getsignal(signal.SIGTERM) != before[0]
    run.restore()
    assert [signal.getsignal(number) for number in handled] == before


def test_a_dying_childs_signal_tells_its_own_engine_only() -> None:
    """Also if the child ends only after the signal. One that ended before was told of already."""
    told: list[str] = []
    first, second = Signals(), Signals()
    ended = {"first": False, "second": False}

    def died(name: str) -> bool:
        return ended[name] and name not in told

    first.take(lambda: told.append("first"), lambda: died("first"))
    second.take(lambda: told.append("second"), lambda: died("second"))
    threading.Timer(0.2, lambda: ended.update(second=True)).start()
    os.kill(os.getpid(), signal.SIGQUIT)
    assert told == ["second"]
    ended["first"] = True
    os.kill(os.getpid(), signal.SIGQUIT)
    assert told == ["second", "first"]
    second.restore()
    first.restore()


def test_a_dying_childs_signal_ends_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its taker is gone when the thread that ends a stuck program reads of it."""
    ended: list[int] = []
    monkeypatch.setattr("selfplay.engines.sglang.processes.os._exit", ended.append)
    monkeypatch.setattr("selfplay.engines.sglang.processes.GRACE_S", 0.1)
    run, engine = Signals(), Signals()
    run.take()
    engine.take(lambda: None)
    os.kill(os.getpid(), signal.SIGQUIT)
    engine.restore()
    time.sleep(0.4)
    run.restore()
    assert ended == []


@pytest.mark.parametrize("number", ENDING)
def test_each_signal_that_ends_a_program_is_an_ordinary_exit(number: signal.Signals) -> None:
    """Unless it was ignored before, as SIGHUP is after nohup: then it stays so."""
    before = signal.getsignal(number)
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(number, handler)
        run = Signals()
        run.take()
        try:
            with pytest.raises(SystemExit) if handler == signal.SIG_DFL else nullcontext() as left:
                os.kill(os.getpid(), number)
            if handler == signal.SIG_DFL:
                assert left.value.code == 128 + number
        finally:
            run.restore()
            assert signal.getsignal(number) == handler
            signal.signal(number, before)
