"""The errors that end a run or that it survives; each message is one line."""

from __future__ import annotations

from collections.abc import Mapping

from dialop.game import GameError
from dialop.shown import error_line, is_own


class SettingsError(ValueError):
    """Invalid settings, files or machine: shown without a traceback, exit status 2."""


class RunEnds(RuntimeError):
    """Ends the run with one line on stderr and status 1; the trainer's state is valid."""


class EngineLost(RunEnds):
    """An engine failed too often in a row; every rank raises it at the same point."""


class EngineDisagrees(RunEnds):
    """The engine's weights or log-probs are not the trainer's; the trainer's state is valid."""


class EngineFault(RuntimeError):
    """The policy's engine died, does not answer, or gave an invalid answer. A restart may help."""


class EnginesFailed(RuntimeError):
    """Engines of these ranks failed, for these causes; every rank raises it at the same point."""

    def __init__(self, causes: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items()))
        self.causes = dict(causes)


class OwnFault(RunEnds):
    """Code of one's own raised, exited or gave what no step can use. `everywhere` says that every
    rank raises it at the same point."""

    everywhere = False


def own_fault(error: BaseException) -> OwnFault | None:
    """The OwnFault of an error, or of an exit, that code of one's own raised; None for others."""
    if isinstance(error, OwnFault | GameError):
        return error if isinstance(error, OwnFault) else OwnFault(str(error))
    if isinstance(error, RunEnds | EngineFault | EnginesFailed):
        return None  # of the project, though a player of one's own may have waited for it
    return OwnFault(error_line(error)) if is_own(error) else None


def with_step(error: RunEnds, step: int) -> RunEnds:
    """The same error; it also says that `step` finished steps are saved and how to resume."""
    return type(error)(
        f"{error}; the state after step {step} is saved, and the same command goes on with step "
        f"{step + 1}"
    )
