"""The clauses of a message: which ones state something, and which deny, ask or compare it."""

from __future__ import annotations

import re

# The end of a clause. A dot inside a number does not end one.
CLAUSE_END = re.compile(r"[,;\n!?]|\.(?!\d)|\b(?:and|but|while|then)\b", re.IGNORECASE)
NEGATED = re.compile(
    r"n['’]t\b|\b(?:not|no|never|none|neither|nor|cannot|without|hardly|doubt|deny|false|untrue"
    r"|wrong|unlike|(?:is|are|was|do|does|did|ca|wo|would|could)nt)\b",
    re.IGNORECASE,
)
# Negations, questions, conditions, comparisons, and words that change a number.
VAGUE = re.compile(
    rf"{NEGATED.pattern}|[?<>≤≥≠≈~±]|\b(?:if|unless|or|maybe|perhaps|than|above|below|under|over"
    r"|least|most|minus|negative|percent|dozen|hundred|thousand|million)\b",
    re.IGNORECASE,
)
# The end of a whole number: no decimal, rank ("4/10") or "40 %" follows.
NUMBER_END = r"(?![\w/^]|[.,'’]\d|\s?%)"
_REACH = 200  # characters of a clause on each side


def is_stated(text: str, start: int, end: int, *, vague: re.Pattern[str] = VAGUE) -> bool:
    """Whether the clause around text[start:end] states it, without a vague word."""
    before = CLAUSE_END.split(text[max(0, start - _REACH) : start])[-1]
    ending = CLAUSE_END.search(text, end, end + _REACH)
    after = text[end : ending.end() if ending else end + _REACH]
    return not vague.search(before) and not vague.search(after)
