"""The measures of an evaluation that tables show, with their headings and meanings."""

from __future__ import annotations

from collections.abc import Collection, Iterable

# Measure, heading, meaning. A table has the columns that at least one of its rows has.
COLUMNS = (
    ("agreement", "agreement", "share of games that end with an accepted proposal or an answer"),
    ("optimal", "optimal", "share of games that end with a best possible plan"),
    ("talk_value", "talk value", "score minus the better of the two seats' solo plans"),
    ("turns", "turns", "tries at a move, including refused ones"),
    ("messages", "messages", "legal messages"),
    ("words", "words", "words in messages"),
    ("statements", "statements", "facts stated in a wording that scripted players can parse"),
    ("searches", "searches", "answered tool calls"),
    ("errors", "errors", "refused moves"),
    ("honesty", "honesty", "share of stated cell values that are true in the speaker's own table"),
    ("questions", "questions", "messages that ask something"),
    ("interactivity", "interact.", "share of messages that got something out of the user"),
    ("tokens", "tokens", "tokens that the policy sampled"),
    ("user_words", "user words", "words of the user"),
)


def columns_of(rows: Iterable[Collection[str]]) -> list[tuple[str, str, str]]:
    """The columns that at least one of the rows has; a row is given by its measures' names."""
    present = {name for row in rows for name in row}
    return [column for column in COLUMNS if column[0] in present]
