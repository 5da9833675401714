"""The errors that end a run or that it survives; each message is one line."""

from __future__ import annotations


class SettingsError(ValueError):
    """Invalid settings, files or machine: shown without a traceback, exit status 2."""


class RunEnds(RuntimeError):
    """Ends the run with one line on stderr and status 1; the trainer's state is valid."""


class EngineDisagrees(RunEnds):
    """The engine's weights or log-probs are not the trainer's; the trainer's state is valid."""


class EngineFault(RuntimeError):
    """The policy's engine died, does not answer, or gave an invalid answer. A restart may help."""


def with_step(error: RunEnds, step: int) -> RunEnds:
    """The same error; it also says that `step` finished steps are saved and how to resume."""
    return type(error)(
        f"{error}; the state after step {step} is saved, and the same command goes on with step "
        f"{step + 1}"
    )
