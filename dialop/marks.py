"""Reads the mark in the answer of a judge, a chat model."""

from __future__ import annotations

import json
import re
from typing import Any

from dialop.tags import after_thought, in_thought

_DECODER = json.JSONDecoder(object_pairs_hook=lambda pairs: pairs)
_START = re.compile(r"^[ \t`*]*(?=\{)", re.MULTILINE)
_END = re.compile(r"[ \t\r`*.]*$", re.MULTILINE)


def read_mark(text: str, name: str) -> float | None:
    """The mark in [0, 1] from an answer's JSON object on separate lines, such as {"NAME": 0.6}.

    Text before the end of the judge's last thought and JSON within a line or another object, such
    as a player's words, are ignored. None without a mark, or if objects give different marks.
    """
    text = "" if in_thought(text) else after_thought(text)
    marks, at = list[Any](), 0
    while start := _START.search(text, at):
        try:
            pairs, at = _DECODER.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            at = start.end() + 1
            continue
        marks += [value for key, value in pairs if key == name and _END.match(text, at)]
    for value in marks:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            return None
    return float(marks[0]) if marks and len(set(marks)) == 1 else None
