"""The trainer: two language-model agents learn to talk by playing with themselves.

The Python API is described in docs/python.md. Its functions are imported when they are first used,
because torch takes seconds.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dialop import __version__

if TYPE_CHECKING:
    from selfplay.api.evaluation import evaluate, play
    from selfplay.api.run import OpenRun, SavedRun, load_run, start, train
    from selfplay.errors import RunEnds, SettingsError
    from selfplay.evaluation.report import Evaluated
    from selfplay.metrics.records import game_text

# OpenMP's threads sleep while they wait for each other. By default they spin, and where other work
# has a core, two threads then take several times as long as one. torch reads this when it is first
# imported, so train.py and eval.py import this package before it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_MODULES = {
    **dict.fromkeys(("evaluate", "play"), "selfplay.api.evaluation"),
    **dict.fromkeys(("OpenRun", "SavedRun", "load_run", "start", "train"), "selfplay.api.run"),
    **dict.fromkeys(("RunEnds", "SettingsError"), "selfplay.errors"),
    "Evaluated": "selfplay.evaluation.report",
    "game_text": "selfplay.metrics.records",
}
__all__ = [
    "Evaluated",
    "OpenRun",
    "RunEnds",
    "SavedRun",
    "SettingsError",
    "__version__",
    "evaluate",
    "game_text",
    "load_run",
    "play",
    "start",
    "train",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
