"""A move's outer form: a `[tag]` in front of its content, and another player's free text as lines
that no game writes. Knows no game and no meaning of a tag.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TAG = re.compile(r"\s*\[([^\[\]\n]{0,40})\]")
_THINK_END = "</think>"
INDENT = "  "


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


def indent_further(text: str) -> str:
    """A player's text with every line after the first indented; any Unicode line break ends a
    line. No text of a game has an indented line, so only the first line can be read as one, and
    the caller writes what stands before it."""
    return f"\n{INDENT}".join(text.splitlines())


def indent_lookalikes(text: str, words: tuple[str, ...]) -> str:
    """A player's text with those lines indented that could be read as a game's own: lines that
    begin with a bracket or with one of `words`, in any case, behind whatever is no letter or digit.
    Every line break becomes a newline; all other lines stay as they are."""
    begins = _lookalike(words)
    return "\n".join(INDENT + line if begins.match(line) else line for line in text.splitlines())


@lru_cache(maxsize=16)
def _lookalike(words: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, words))
    return re.compile(rf"[\W_]*?(?:\[|(?:{names})(?![^\W_]))", re.IGNORECASE)
