"""Text from outside as a person may see it: nothing in it moves a cursor, hides or turns round what
stands beside it. For what is shown; what is stored stays as it was said."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with a `·` for each character that is not printed: controls and escape sequences,
    carriage returns, marks of writing direction, halves of surrogate pairs. Line ends stay, a tab
    is four blanks."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "·" for c in text)


def on_one_line(text: str) -> str:
    """The same with its lines behind each other."""
    return " ".join(printable(text).split("\n"))
