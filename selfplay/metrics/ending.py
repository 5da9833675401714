"""Ends a run that failed a check: saves the trainer's state, then raises an error that names the
step at which a restart continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from selfplay.errors import RunEnds


class Ending:
    """Keeps an error that must end the run until the step is saved and logged. All ranks keep the
    same error."""

    def __init__(self) -> None:
        self.error: RunEnds | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep a RunEnds raised in this block as `error`, unless `error` already holds one."""
        try:
            yield
        except RunEnds as error:
            self.error = self.error or error

    def raise_deferred(self, step: int) -> None:
        """Raise the kept error, if any; the state after `step` finished steps is saved."""
        if self.error is not None:
            raise _noted(self.error, step)


@contextmanager
def save_on_end(save: Callable[[], object], step: int) -> Iterator[None]:
    """Call `save`, which writes the state after `step` finished steps, if this block raises a
    RunEnds. The block must not have changed a weight by then."""
    try:
        yield
    except RunEnds as error:
        save()
        raise _noted(error, step) from error


def _noted(error: RunEnds, step: int) -> RunEnds:
    """The same error; it also says that `step` finished steps are saved and how to resume."""
    return type(error)(
        f"{error}; the state after step {step} is saved, and the same command goes on with step "
        f"{step + 1}"
    )
