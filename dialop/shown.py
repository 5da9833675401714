"""Makes untrusted text safe to display. Control characters in it cannot move the cursor, hide other
text or change the writing direction. Stored text is never changed."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROJECT = ("dialop", "selfplay")
_NOT_OWN = {*_PROJECT, "train", "eval", "__main__", *sys.stdlib_module_names}


def printable(text: str) -> str:
    """The text with a `·` for each unprintable character.

    These are control characters, escapes, carriage returns, marks of writing direction and halves
    of surrogate pairs. Line ends stay, and a tab becomes four spaces.
    """
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "·" for c in text)


def on_one_line(text: str) -> str:
    """The printable text with its lines joined by spaces."""
    return " ".join(printable(text).split("\n"))


def error_line(error: BaseException) -> str:
    """The error's type and message on one line, at most 500 characters, preceded by the line of
    custom code that raised it, if any, and followed by its notes: "my_game.py:53 outcome: KeyError:
    'day' (in instance 3)"."""
    where = f"{place}: " if (place := own_place(error)) else ""
    notes = "".join(f" ({on_one_line(note)})" for note in getattr(error, "__notes__", ()))
    return " ".join(printable(f"{where}{type(error).__name__}: {error}").split())[:500] + notes


def error_text(error: BaseException) -> str:
    """The error's printable message; for an error in custom code as `error_line` shows it."""
    place = own_place(error)
    return error_line(error) if place and place not in str(error) else printable(str(error))


def own_place(error: BaseException) -> str:
    """File, line and function of the innermost call of an error's traceback that is not part of
    this project, of Python or of an installed package; "" if there is none."""
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_OWN
        and "site-packages" not in Path(frame.f_code.co_filename).parts
    ]
    return places[-1] if places else ""


def first_cause(error: BaseException) -> BaseException:
    """The first error in the chain of causes from which this one was raised."""
    return error if error.__cause__ is None else first_cause(error.__cause__)


def is_own(error: BaseException) -> bool:
    """Whether custom code, not a signal's handler, raised this error or this SystemExit."""
    if isinstance(error, Exception) or not isinstance(error, SystemExit):
        return isinstance(error, Exception) and own_place(error) != ""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    in_project = last.f_globals.get("__name__", "").partition(".")[0] in _PROJECT
    return own_place(error) != "" and not in_project


def line_of(function: Callable[..., Any]) -> str:
    """File and line of a custom function's start, as " (my_loss.py:12)"; "" if it has no code."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""


def fenced(text: str) -> str:
    """Text as a Markdown code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def escaped(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    return re.sub(r"([\\`*_|<>\[\]&~#!])", r"\\\1", on_one_line(text))
