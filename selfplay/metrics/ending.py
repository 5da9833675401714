"""How a check ends a run: the trainer's state is saved first, and the error names the step that a
restart begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RunEnds(RuntimeError):
    """Ends the run with one line on stderr and status 1; the trainer's state is valid."""


class Ending:
    """Keeps an error that must end the run until its step is saved and logged. The same on every
    rank."""

    def __init__(self) -> None:
        self.trouble: RunEnds | None = None

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Keep a RunEnds from inside in `trouble`, unless an earlier one is kept there."""
        try:
            yield
        except RunEnds as error:
            self.trouble = self.trouble or error

    def hold(self, step: int) -> None:
        """Raise what was put off; the state after `step` finished steps is saved."""
        if self.trouble is not None:
            raise noted(self.trouble, step)


@contextmanager
def saved_first(save: Callable[[], object], step: int) -> Iterator[None]:
    """If a RunEnds leaves this context, call `save` before raising it again.

    Inside, no weight has moved yet: `save` writes the state after `step` finished steps.
    """
    try:
        yield
    except RunEnds as error:
        save()
        raise noted(error, step) from error


def noted(error: RunEnds, step: int) -> RunEnds:
    """The same error, with what is saved after `step` finished steps and how to go on."""
    return type(error)(
        f"{error}; the state after step {step} is saved, and the same command goes on with step "
        f"{step + 1}"
    )
