"""Finds the engine class by `engine.kind`; no other room depends on which one it is."""

from __future__ import annotations

from typing import cast

from selfplay.config.plugins import function_of
from selfplay.engines.base import Engine


def engine_kind(name: str) -> type[Engine]:
    """The engine class for a value of `engine.kind`, built in or custom.

    Raises ValueError, one line, if its module cannot be imported or the class is invalid.
    """
    return cast(type[Engine], function_of("engine.kind", name))
