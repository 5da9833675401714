"""Finds the cell values that a message states, and counts how many of them are true.

Understands lists and sentences that link one number to one reviewer and one paper, in any order:
"Ava BLEU 87", "Ava on BLEU is 87", "87 for Ava on BLEU", "Ava: BLEU 87, Electra 12", "BLEU: Ava 87,
Daniel 12". Questions, negations and comparisons state nothing, and neither does a number next to a
name that is not on the board. Values are in the displayed units of the seat that wrote the message.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, Protocol

from dialop.clauses import CLAUSE_END, NUMBER_END, VAGUE
from dialop.matching.board import MatchingView
from dialop.matching.roster import paper_forms, reviewer_forms
from dialop.specs import folded

# Longer numbers and negative ones are not values. A dash after a letter is not a minus.
_NUMBER = re.compile(
    rf"(?<![\w./%^])(?<!\d[,'’])(?<!\W[-‐‑–—−])(?<!\A[-‐‑–—−])(\d{{1,6}}){NUMBER_END}"
)
_MARK = "\u0300-\u036f"  # combines with the letter before it
_WORD = re.compile(rf"[^\W\d_][\w{_MARK}]*")
# Words that are not names: words between a name and a number, and openings of a sentence.
_PLAIN = re.compile(
    r"(?:a|about|also|alright|an|and|are|as|at|best|but|each|for|from|gave|gets?|gives?|got|had|has"
    r"|have|he|hello|hey|hi|her|here|hers|hes|his|i|im|in|is|it|its|ive|just|like|me|mine|my|of|ok"
    r"|okay|on|only|or|our|papers?|person|respectively|reviewers?|s|same|scored?|scores|sees?|shes?"
    r"|shows|so|sure|t|that|the|their|then|there|they|this|to|too|values?|was|we|well|were|who|whose"
    r"|with|worth|yeah|yes)"
)


class Names(Protocol):
    """An object with a board's names, such as a view or an instance."""

    @property
    def reviewers(self) -> tuple[str, ...]: ...
    @property
    def papers(self) -> tuple[str, ...]: ...


class _Mention(NamedTuple):
    kind: str  # "R" a reviewer, "P" a paper, "N" a number
    value: int
    start: int


def stated_cells(text: str, names: Names) -> list[tuple[int, int, int]]:
    """A message's (reviewer index, paper index, value) statements, in order, with repetitions."""
    return list(_stated(text, names.reviewers, names.papers))


@lru_cache(maxsize=4096)  # games on one board often repeat a message
def _stated(
    text: str, reviewers: tuple[str, ...], papers: tuple[str, ...]
) -> tuple[tuple[int, int, int], ...]:
    # Names are blanked in `plain`, so that words inside a title cannot end a clause.
    mentions, plain = _mentions(text, reviewers, papers)
    ends = [m.end() for m in CLAUSE_END.finditer(plain)] + [len(plain)]
    starts = [mention.start for mention in mentions]
    capitals = {folded(word) for word in _WORD.findall(text) if word[0].isupper()}
    stated: list[tuple[int, int, int]] = []
    context: dict[str, int] = {}
    start = first = 0
    for end in ends:
        beyond = bisect_left(starts, end, lo=first)
        clause = mentions[first:beyond]
        strange = _names_another(plain[start:end], mentions=bool(clause), capitals=capitals)
        if strange:
            context.clear()
        if clause and not VAGUE.search(plain, start, end):
            stated += _read_clause(clause, context, strict=strange)
        context.update({m.kind: m.value for m in clause if m.kind != "N"})
        start, first = end, beyond
    return tuple(stated)


def count_true(view: MatchingView, text: str) -> tuple[int, int]:
    """The number of true statements in a message, and the number of all statements.

    A statement is true if it equals the displayed value in `view`, the view of the seat that wrote
    the message. A statement about a cell that this seat does not see is not true.
    """
    stated = stated_cells(text, view)
    return sum(view.displayed[r][p] == value for r, p, value in stated), len(stated)


def _names_another(clause: str, *, mentions: bool, capitals: Collection[str]) -> bool:
    """Whether a clause, whose names are blanked, has a word that may name someone or something that
    is not on the board: a capitalised word, or with `mentions` any word that is not plain."""
    words = [word for word in _WORD.findall(clause) if not _PLAIN.fullmatch(word)]
    return any(mentions or word in capitals for word in words)


def _read_clause(
    clause: Sequence[_Mention], context: dict[str, int], *, strict: bool
) -> list[tuple[int, int, int]]:
    """The statements of one clause.

    A clause without a reviewer (or paper) refers to the last one named before it. With `strict`
    each number needs both names next to it.
    """
    signature = "".join([m.kind for m in clause])
    # Only clauses with one consistent order are read; any other order is ambiguous.
    for unit in ("RPN", "PRN", "RNP", "PNR", "NRP", "NPR"):
        if signature and signature == unit * (len(signature) // 3):
            groups = [clause[i : i + 3] for i in range(0, len(clause), 3)]
            return [_cell(group, {}) for group in groups]
    if strict:
        return []
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
    """Names and numbers in order of appearance, and the folded text with both blanked.

    All positions are in the folded text, because folding may change the length: ß is ss. Names are
    matched first, so digits within a name are not read as numbers.
    """
    pattern, owner = _name_pattern(reviewers, papers)
    mentions = []

    def take_name(match: re.Match[str]) -> str:
        mentions.append(_Mention(*owner[" ".join(match[0].split())], match.start()))
        return "_" * len(match[0])

    def take_number(match: re.Match[str]) -> str:
        mentions.append(_Mention("N", int(match[0]), match.start()))
        return "_" * len(match[0])

    plain = _NUMBER.sub(take_number, pattern.sub(take_name, folded(text)))
    return sorted(mentions, key=attrgetter("start")), plain


@lru_cache(maxsize=16)
def _name_pattern(
    reviewers: tuple[str, ...], papers: tuple[str, ...]
) -> tuple[re.Pattern[str], dict[str, tuple[str, int]]]:
    """A pattern that matches every unambiguous form of every name in folded text, longest first,
    and the (kind, index) of each form."""
    owners: dict[str, set[tuple[str, int]]] = {}
    for kind, names, forms in (("R", reviewers, reviewer_forms), ("P", papers, paper_forms)):
        for index, name in enumerate(names):
            for form in forms(name):
                owners.setdefault(" ".join(folded(form).split()), set()).add((kind, index))
    owner = {form: next(iter(who)) for form, who in owners.items() if len(who) == 1}
    parts = [
        re.escape(form).replace(r"\ ", r"\s+") for form in sorted(owner, key=len, reverse=True)
    ]
    return re.compile(rf"(?<![\w{_MARK}])(?:{'|'.join(parts)})(?![\w{_MARK}])"), owner
