"""The errors that end a run or that it survives; each message is one line for the user."""

from __future__ import annotations


class SettingsError(ValueError):
    """Invalid settings, files or machine: shown without a traceback, exit status 2."""


class RunEnds(RuntimeError):
    """Ends the run with one line on stderr and status 1; the trainer's state is valid."""


class EngineFault(RuntimeError):
    """The policy's engine died, does not answer, or gave an invalid answer. A restart may help."""
