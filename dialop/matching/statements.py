"""Which cell values a message states, and how many of them are true. Reads text only, never a table
it was not given.

Understood are lists and sentences that tie one number to one reviewer and one paper, in any order:
"Ava BLEU 87", "Ava on BLEU is 87", "87 for Ava on BLEU", "Ava: BLEU 87, Electra 12", "BLEU: Ava 87,
Daniel 12". Questions, negations and comparisons state nothing. Values are in the speaker's
displayed units.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, Protocol

from dialop.matching.board import MatchingView
from dialop.matching.roster import paper_forms, reviewer_forms

# Clauses end here; a name or number never spans the end. A dot ends one unless it stands inside a
# number.
_CLAUSE_END = re.compile(r"[,;\n!]|\.(?!\d)|\?|\b(?:and|but|while|then)\b", re.IGNORECASE)
_VAGUE = re.compile(
    r"\b(?:not|no|never|n't|than|above|below|under|over|least|most|if|or|maybe)\b|n't\b|[<>?]",
    re.IGNORECASE,
)
# Six digits are far above any value shown; longer runs, decimals, ranks ("4/10") and shares ("40
# %") are no values.
_NUMBER = re.compile(r"(?<![\w./%])(\d{1,6})(?![\w/]|\.\d|\s?%)")


class Names(Protocol):
    """Anything that knows a board's names, a view or an instance."""

    @property
    def reviewers(self) -> tuple[str, ...]: ...
    @property
    def papers(self) -> tuple[str, ...]: ...


class _Mention(NamedTuple):
    kind: str  # "R" a reviewer, "P" a paper, "N" a number
    value: int
    start: int


def stated_cells(text: str, names: Names) -> list[tuple[int, int, int]]:
    """The (reviewer index, paper index, value) statements of a message, in order, repetitions
    included."""
    return list(_stated(text, names.reviewers, names.papers))


@lru_cache(maxsize=4096)  # games of one board often say the same
def _stated(
    text: str, reviewers: tuple[str, ...], papers: tuple[str, ...]
) -> tuple[tuple[int, int, int], ...]:
    # In the blanked text words inside a title cannot end a clause.
    mentions, plain = _mentions(text, reviewers, papers)
    ends = [m.end() for m in _CLAUSE_END.finditer(plain)] + [len(plain)]
    starts = [mention.start for mention in mentions]
    stated: list[tuple[int, int, int]] = []
    context: dict[str, int] = {}
    start = first = 0
    for end in ends:
        beyond = bisect_left(starts, end, lo=first)
        clause = mentions[first:beyond]
        if clause and not _VAGUE.search(plain, start, end):
            stated += _read_clause(clause, context)
        context.update({m.kind: m.value for m in clause if m.kind != "N"})
        start, first = end, beyond
    return tuple(stated)


def count_true(view: MatchingView, text: str) -> tuple[int, int]:
    """How many of a message's statements equal the speaker's displayed values, and how many it
    makes.

    `view` is the speaker's own. A statement about a cell that the speaker does not see is not true.
    """
    stated = stated_cells(text, view)
    return sum(view.displayed[r][p] == value for r, p, value in stated), len(stated)


def _read_clause(clause: Sequence[_Mention], context: dict[str, int]) -> list[tuple[int, int, int]]:
    """The statements of one clause. A clause that lacks the reviewer or the paper takes the one
    named last before."""
    signature = "".join([m.kind for m in clause])
    # Only clauses that follow one order throughout are read; a jumble could mean several things.
    for unit in ("RPN", "PRN", "RNP", "PNR", "NRP", "NPR"):
        if signature and signature == unit * (len(signature) // 3):
            groups = [clause[i : i + 3] for i in range(0, len(clause), 3)]
            return [_cell(group, {}) for group in groups]
    for unit, needed in (("PN", "R"), ("NP", "R"), ("RN", "P"), ("NR", "P")):
        if needed in context and signature and signature == unit * (len(signature) // 2):
            groups = [clause[i : i + 2] for i in range(0, len(clause), 2)]
            return [_cell(group, {needed: context[needed]}) for group in groups]
    # A row or column written without commas: "Ava BLEU 87 Electra 12".
    for head, unit in (("R", "PN"), ("R", "NP"), ("P", "RN"), ("P", "NR")):
        rest = signature[1:]
        if signature[:1] == head and rest and rest == unit * (len(rest) // 2):
            groups = [clause[i : i + 2] for i in range(1, len(clause), 2)]
            return [_cell(group, {head: clause[0].value}) for group in groups]
    return []


def _cell(group: Sequence[_Mention], given: dict[str, int]) -> tuple[int, int, int]:
    parts = given | {m.kind: m.value for m in group}
    return parts["R"], parts["P"], parts["N"]


def _mentions(
    text: str, reviewers: tuple[str, ...], papers: tuple[str, ...]
) -> tuple[list[_Mention], str]:
    """Names and numbers in order of appearance, and the text with them blanked. Names are found
    first, so digits inside a name are no numbers."""
    pattern, owner = _name_pattern(reviewers, papers)
    found = []

    def take_name(match: re.Match[str]) -> str:
        # Ignoring case lets a few foreign letters match that fold to something else; those are no
        # names.
        meant = owner.get(_folded(match[0]))
        if meant is None:
            return match[0]
        found.append(_Mention(*meant, match.start()))
        return "x" * len(match[0])

    def take_number(match: re.Match[str]) -> str:
        found.append(_Mention("N", int(match[0]), match.start()))
        return "x" * len(match[0])

    plain = _NUMBER.sub(take_number, pattern.sub(take_name, text))
    return sorted(found, key=attrgetter("start")), plain


@lru_cache(maxsize=256)
def _folded(name: str) -> str:
    return " ".join(name.casefold().split())


@lru_cache(maxsize=16)
def _name_pattern(
    reviewers: tuple[str, ...], papers: tuple[str, ...]
) -> tuple[re.Pattern[str], dict[str, tuple[str, int]]]:
    """One pattern for every unambiguous form of every name, longest first, and whom each form
    means."""
    owners: dict[str, set[tuple[str, int]]] = {}
    for kind, names, forms in (("R", reviewers, reviewer_forms), ("P", papers, paper_forms)):
        for index, name in enumerate(names):
            for form in forms(name):
                owners.setdefault(_folded(form), set()).add((kind, index))
    owner = {form: next(iter(who)) for form, who in owners.items() if len(who) == 1}
    parts = [
        re.escape(form).replace(r"\ ", r"\s+") for form in sorted(owner, key=len, reverse=True)
    ]
    return re.compile(rf"(?<!\w)(?:{'|'.join(parts)})(?!\w)", re.IGNORECASE), owner
