"""A run and its engines share the process's signal handlers."""

import os
import signal

from selfplay.engines.sglang.processes import Signals


def test_signals_reach_every_taker_and_come_back_in_any_order() -> None:
    """A run, two engines, and the restart of the one that started first."""
    handled = (signal.SIGTERM, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in handled]
    told: list[str] = []
    run, first, second = Signals(), Signals(), Signals()
    run.take()
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
    assert signal.getsignal(signal.SIGQUIT) == before[1]
    assert signal.getsignal(signal.SIGTERM) != before[0]
    run.restore()
    assert [signal.getsignal(number) for number in handled] == before
