"""Errors that end a run, and errors that it survives; each message is one line."""

from __future__ import annotations

from collections.abc import Mapping

from dialop.game import GameError
from dialop.shown import error_line, is_own


class SettingsError(ValueError):
    """Invalid settings, files or machine; shown without a traceback, with exit status 2."""


class RunEnds(RuntimeError):
    """Ends the run with one line on stderr and exit status 1; the trainer's state is valid."""


class EngineLost(RunEnds):
    """An engine failed too often in a row; every rank raises it at the same point."""


class EngineDisagrees(RunEnds):
    """The engine's weights or log-probs differ from the trainer's; the trainer's state is valid."""


class EngineFault(RuntimeError):
    """The policy's engine died, does not answer, or answered incorrectly. A restart may help.

    `model` is that of the request that it failed, if it was one of a game."""

    model: str | None = None


class EnginesFailed(RuntimeError):
    """The engines of these ranks failed, with causes; every rank raises it at the same point."""

    def __init__(self, causes: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items()))
        self.causes = dict(causes)


class OwnFault(RunEnds):
    """Custom code raised, exited or returned an unusable value. With `everywhere` every rank raises
    it at the same point."""

    everywhere = False


def own_fault(error: BaseException) -> OwnFault | None:
    """The OwnFault for an error or an exit that custom code raised; None for other errors."""
    if isinstance(error, GameError):
        return OwnFault(str(error))
    if isinstance(error, OwnFault):
        return error
    if isinstance(error, RunEnds | EngineFault | EnginesFailed):
        return None  # raised by the project, though a custom player may have waited for it
    return OwnFault(error_line(error)) if is_own(error) else None


def with_step(error: RunEnds, step: int) -> RunEnds:
    """The same error; its message adds that `step` finished steps are saved, and how to resume."""
    return type(error)(
        f"{error}; the state after step {step} is saved, and the same command continues with step "
        f"{step + 1}"
    )
