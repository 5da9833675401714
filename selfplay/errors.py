"""The errors that end a run or that it survives, and how a run ends; each message is one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """Invalid settings, files or machine: shown without a traceback, exit status 2."""


class RunEnds(RuntimeError):
    """Ends the run with one line on stderr and status 1; the trainer's state is valid."""


class EngineDisagrees(RunEnds):
    """The engine's weights or log-probs are not the trainer's; the trainer's state is valid."""


class EngineFault(RuntimeError):
    """The policy's engine died, does not answer, or gave an invalid answer. A restart may help."""


class Ending:
    """How a run ends when a check fails: the trainer's state is saved first.

    A step has two phases. Before the weights change, a RunEnds ends the run at once, with the state
    before the step. After they have changed, it is kept until the step is logged and saved. All
    ranks raise the same error.
    """

    def __init__(self) -> None:
        self.error: RunEnds | None = None

    @contextmanager
    def before_update(self, save: Callable[[], object], step: int) -> Iterator[None]:
        """If this block raises a RunEnds, call `save`, which writes the state after `step` finished
        steps, and raise the error with that step. The block must not have changed a weight then."""
        try:
            yield
        except RunEnds as error:
            save()
            raise _with_step(error, step) from error

    @contextmanager
    def after_update(self) -> Iterator[None]:
        """Keep a RunEnds that this block raises as `error`."""
        try:
            yield
        except RunEnds as error:
            self.error = error

    def raise_kept(self, step: int) -> None:
        """Raise the kept error, if any; the state after `step` finished steps is saved."""
        if self.error is not None:
            raise _with_step(self.error, step)


def _with_step(error: RunEnds, step: int) -> RunEnds:
    """The same error; it also says that `step` finished steps are saved and how to resume."""
    return type(error)(
        f"{error}; the state after step {step} is saved, and the same command goes on with step "
        f"{step + 1}"
    )
