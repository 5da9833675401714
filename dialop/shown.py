"""Makes untrusted text safe to display. Control characters in it cannot move the cursor, hide other
text or change the writing direction. Stored text is never changed."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """The text with a `·` for each unprintable character.

    These are control characters, escapes, carriage returns, marks of writing direction and halves
    of surrogate pairs. Line ends stay and a tab becomes four spaces.
    """
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "·" for c in text)


def on_one_line(text: str) -> str:
    """The printable text with its lines joined by spaces."""
    return " ".join(printable(text).split("\n"))


def error_line(error: BaseException) -> str:
    """The error's type and message on one line, at most 500 characters of it."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def fenced(text: str) -> str:
    """Text as a Markdown code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def escaped(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    return re.sub(r"([\\`*_|<>\[\]&~#!])", r"\\\1", on_one_line(text))
