"""Reads the mark that a judge, a chat model, gives in its answer."""

from __future__ import annotations

import json
import re

_MARK = re.compile(r"\{[^{}]*\}")


def read_mark(text: str, name: str) -> float | None:
    """The last valid mark in an answer, as in {"NAME": 0.6}; None if it has no mark in [0, 1]."""
    for candidate in reversed(_MARK.findall(text)):
        try:
            value = json.loads(candidate).get(name)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
    return None
