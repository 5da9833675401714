"""Makes untrusted text safe to display. Control characters in it cannot move the cursor, hide other
text or change the writing direction. Stored text is never changed."""

from __future__ import annotations


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
