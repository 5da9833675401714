"""The outer form of a move: a `[tag]`, then its content.

Also quotes a player's free text for the other seat, indented so that no line of it can be mistaken
for a line that the game wrote.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TAG = re.compile(r"\s*\[([^\[\]\n]{0,40})\]")
_MESSAGE = re.compile(r"(.*?\[\s*message\s*\]\s*)(.*)", re.IGNORECASE | re.DOTALL)
THINK_END = "</think>"
INDENT = "  "


def split_move(text: str) -> tuple[str, str] | None:
    """The lower-case tag at the start of a move and its stripped content, None without a tag."""
    match = _TAG.match(text)
    if match is None:
        return None
    return match[1].strip().lower(), text[match.end() :].strip()


def split_message(text: str) -> tuple[str, str]:
    """A message's start, with recipient and tag where it has them, and its stripped words. Private
    reasoning before the tag belongs to neither."""
    text = drop_reasoning(text, ("message",))
    match = _MESSAGE.fullmatch(text)
    return (match[1], match[2].strip()) if match else ("", text.strip())


def drop_reasoning(text: str, tags: tuple[str, ...]) -> str:
    """A move without the private text before its tag.

    Drops everything up to the last `</think>`, then everything before the first line that starts
    with one of `tags`. If no line does, all text after `</think>` is kept.
    """
    text = text.rpartition(THINK_END)[2]
    match = _line_start(tags).search(text)
    return text[match.start() :] if match else text


@lru_cache(maxsize=16)
def _line_start(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, tags))
    return re.compile(rf"^[ \t]*\[[ \t]*(?:{names})[ \t]*\]", re.IGNORECASE | re.MULTILINE)


def indent_further(text: str) -> str:
    """A player's text with every line after the first indented. Any Unicode line break counts.

    Games never write an indented line, so only the first line could be mistaken for one of theirs.
    The caller puts its own text before that line.
    """
    return f"\n{INDENT}".join(text.splitlines())


def indent_lookalikes(text: str, words: tuple[str, ...]) -> str:
    """A player's text in which each line that looks like the game's own is indented.

    Such a line begins, after any characters that are not letters or digits, with a bracket or with
    one of `words` (regular expressions; case ignored). Every line break becomes a newline. Other
    lines stay unchanged.
    """
    pattern = _lookalike(words)
    return "\n".join(INDENT + line if pattern.match(line) else line for line in text.splitlines())


@lru_cache(maxsize=16)
def _lookalike(words: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(words)
    return re.compile(rf"[\W_]*?(?:\[|(?:{names})(?![^\W_]))", re.IGNORECASE)
