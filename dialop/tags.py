"""A move's outer form: a `[tag]` in front of its content. Knows no game and no meaning of a tag."""

from __future__ import annotations

import re
from functools import lru_cache

_TAG = re.compile(r"\s*\[([^\[\]\n]{0,40})\]")
_THINK_END = "</think>"


def split_move(text: str) -> tuple[str, str] | None:
    """The lower-case tag at the start of a move and its stripped content, None without a tag.

    Content keeps its lines whole.
    """
    match = _TAG.match(text)
    if match is None:
        return None
    return match[1].strip().lower(), text[match.end() :].strip()


def drop_reasoning(text: str, tags: tuple[str, ...]) -> str:
    """A move without the private text before its tag.

    That is everything up to the last `</think>`, then everything before the first line that
    starts with one of `tags`. A text without such a line is returned from there on, unshortened.
    """
    text = text.rpartition(_THINK_END)[2]
    found = _line_start(tags).search(text)
    return text[found.start() :] if found else text


@lru_cache(maxsize=16)
def _line_start(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, tags))
    return re.compile(rf"^[ \t]*\[[ \t]*(?:{names})[ \t]*\]", re.IGNORECASE | re.MULTILINE)
