"""The engine that `engine.kind` names; nothing outside this room asks which one it is."""

from __future__ import annotations

from typing import cast

from selfplay.config.plugins import function_of
from selfplay.engines.base import Engine


def engine_kind(name: str) -> type[Engine]:
    """The class of the engine that `engine.kind` names, built in or of your own.

    Raises ValueError, one line, if its module cannot be imported or it starts otherwise.
    """
    return cast(type[Engine], function_of("engine.kind", name))
