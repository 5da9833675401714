"""The outer form of a move: a `[tag]`, then its content.

Also quotes a player's free text for the other seat, indented so that no line of it can be mistaken
for a line of the game.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TAG = re.compile(r"\s*\[([^\[\]\n]{0,40})\]")
_MESSAGE = re.compile(r"(.*?\[\s*message\s*\]\s*)(.*)", re.IGNORECASE | re.DOTALL)
# How chat models mark thoughts: Qwen and DeepSeek, Seed, Magistral, Command A, Kimi, gpt-oss.
_THOUGHT = r"(?:seed:)?think(?:ing)?|thoughts?|reasoning"
_OPENED = re.compile(
    rf"<(?:{_THOUGHT})>|(?-i:\[THINK\])|<\|START_THINKING\|>|<\|begin_of_thought\|>|◁think▷"
    r"|<\|channel\|>(?!final)|\A\s*(?-i:analysis(?=[A-Z]))",
    re.IGNORECASE,
)
_CLOSED = re.compile(
    rf"</(?:{_THOUGHT})>|(?-i:\[/THINK\])|<\|END_THINKING\|>|<\|end_of_thought\|>|◁/think▷"
    r"|<\|channel\|>final<\|message\|>|assistantfinal",
    re.IGNORECASE,
)
MAX_MOVE = 20_000  # characters of a move or message by others; about 5,000 tokens of English
INDENT = "  "


def split_move(text: str) -> tuple[str, str] | None:
    """The lower-case tag at the start of a move and its stripped content, None without a tag."""
    match = _TAG.match(text)
    if match is None:
        return None
    return match[1].strip().lower(), text[match.end() :].strip()


def split_message(text: str) -> tuple[str, str]:
    """A message's start (its recipient and tag, if any) and its stripped words. Private reasoning
    before the tag is dropped."""
    text = drop_reasoning(text, ("message",))
    match = _MESSAGE.fullmatch(text)
    return (match[1], match[2].strip()) if match else ("", text.strip())


def after_thought(text: str) -> str:
    """A chat model's text after the end of its last thought, such as `</think>`."""
    ends = [match.end() for match in _CLOSED.finditer(text)]
    return text[ends[-1] :] if ends else text


def in_thought(text: str) -> bool:
    """Whether a chat model's text ends within a thought."""
    return _OPENED.search(after_thought(text)) is not None


def drop_reasoning(text: str, tags: tuple[str, ...], before: str = "") -> str:
    """A move without the private text before its tag.

    Drops everything up to the end of its last thought, then everything before the first line that
    starts with a match of the regular expression `before` and one of `tags`. Without such a line,
    all text after the thought is kept.
    """
    text = after_thought(text)
    match = _line_start(tags, before).search(text)
    return text[match.start() :] if match else text


@lru_cache(maxsize=16)
def _line_start(tags: tuple[str, ...], before: str) -> re.Pattern[str]:
    names = "|".join(map(re.escape, tags))
    return re.compile(rf"^[ \t]*{before}\[[ \t]*(?:{names})[ \t]*\]", re.IGNORECASE | re.MULTILINE)


def indent_further(text: str) -> str:
    """A player's text with every line after the first indented. Any Unicode line break counts.

    Games never write an indented line, so only the first line could be mistaken for the game's. The
    caller puts its own text before that line.
    """
    return f"\n{INDENT}".join(text.splitlines())


def indent_lookalikes(text: str, words: tuple[str, ...]) -> str:
    """A player's text with an indent before each line that looks like a line of the game.

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
