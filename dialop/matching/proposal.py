"""Proposals as text: one `paper: reviewer` line a paper, read forgivingly, written one way. Knows
no game state.

A matching is a tuple of (reviewer, paper) index pairs in the order of the board's names, sorted by
reviewer.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

from dialop.game import PlayerError
from dialop.matching.roster import display_names, paper_forms, reviewer_forms

Pairs = tuple[tuple[int, int], ...]

_BREAK = re.compile(r"<br\s*/?>|\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", re.IGNORECASE)
_HEADER = re.compile(r"^[\W_]*proposal[\s*_#]*(?::[\s*_]*|$)", re.IGNORECASE)
_NUMBERING = re.compile(r"^[\W_]*\d+\s*[.):]\s*")
_WORD = re.compile(r"[^\W_]+")
# A character reference of any length is one character; Python refuses to read very long numbers.
_LONG_REFERENCE = re.compile(r"&#(?:\d{8,}|x[\da-f]{8,});?", re.IGNORECASE)
_QUOTE_CHARS = 40
_MAX_LINE = 1000  # characters; several times what a line with two names needs


def parse_proposal(
    text: str, reviewers: Sequence[str], *, papers: Sequence[str], brief: bool = False
) -> Pairs:
    """Read a proposal as a perfect matching of `reviewers` and `papers`.

    Lines end at a newline or `<br/>`; a `Proposal:` header, bullets, numbering, `&emsp;`, markdown
    emphasis and case are forgiven; a line is split at its last colon, so full titles may hold
    colons of their own.

    Raises:
        PlayerError: kind "bad_proposal"; the message names the line and the valid choices (by short
        names if `brief`).
    """
    shown_reviewers, shown_papers = display_names(reviewers, papers, brief=brief)
    find_reviewer = _lookup(tuple(reviewers), reviewer_forms)
    find_paper = _lookup(tuple(papers), paper_forms)
    reviewer_of: dict[int, int] = {}

    def free_papers() -> list[str]:
        return [name for i, name in enumerate(shown_papers) if i not in reviewer_of]

    def free_reviewers() -> list[str]:
        taken = reviewer_of.values()
        return [name for i, name in enumerate(shown_reviewers) if i not in taken]

    for number, line in enumerate(_lines(text), start=1):
        where = f"line {number}" if brief else f'line {number} "{_shorten(line)}"'
        if len(line) > _MAX_LINE:
            raise _refused(f"{where} is longer than {_MAX_LINE} characters", free_papers)
        paper_text, colon, reviewer_text = line.rpartition(":")
        if not colon:
            raise _refused(f"{where} has no colon; write paper: reviewer", free_papers)
        paper = _one(find_paper(paper_text), where, what="paper", valid=free_papers)
        reviewer = _one(find_reviewer(reviewer_text), where, what="reviewer", valid=free_reviewers)
        if paper in reviewer_of:
            raise _refused(f"{where} names {shown_papers[paper]} again", free_papers)
        if reviewer in reviewer_of.values():
            raise _refused(f"{where} uses {shown_reviewers[reviewer]} again", free_reviewers)
        reviewer_of[paper] = reviewer
    if len(reviewer_of) < len(papers):
        where = f"line {len(reviewer_of) + 1} is missing"
        raise _refused(f"{where}; {len(papers)} lines needed", free_papers)
    return tuple(sorted((reviewer, paper) for paper, reviewer in reviewer_of.items()))


def render_proposal(
    pairs: Pairs,
    reviewers: Sequence[str],
    *,
    papers: Sequence[str],
    brief: bool = False,
    as_given: bool = False,
) -> str:
    """Write a matching in the papers' order, or in the order of `pairs` if `as_given`: `Proposal:`
    and full names, or first names and no header if `brief`."""
    shown_reviewers, shown_papers = display_names(reviewers, papers, brief=brief)
    lines = [] if brief else ["Proposal:"]
    ordered = pairs if as_given else sorted(pairs, key=lambda pair: pair[1])
    for reviewer, paper in ordered:
        lines.append(f"{shown_papers[paper]}: {shown_reviewers[reviewer]}")
    return "\n".join(lines)


def normalise(text: str) -> str:
    """Letters and digits in lower case, everything else a single blank."""
    return " ".join(_WORD.findall(text.casefold()))


def _lines(text: str) -> list[str]:
    """The pair lines of a proposal, without header, numbering and lines that hold no letter or
    digit."""
    lines = [_plain(line) for line in _BREAK.split(text)]
    lines = [line.strip() for line in lines if normalise(line)]
    if lines:
        lines[0] = _HEADER.sub("", lines[0])
    lines = [_NUMBERING.sub("", line) for line in lines]
    return [line for line in lines if normalise(line)]


def _plain(line: str) -> str:
    """A line without character references and compatibility forms. One that is too long to be read
    stays as it is: putting combining marks in order takes time with their square."""
    if len(line) > _MAX_LINE:
        return line
    return unicodedata.normalize("NFKC", html.unescape(_LONG_REFERENCE.sub("\ufffd", line)))


@lru_cache(maxsize=16)
def _lookup(
    names: tuple[str, ...], forms: Callable[[str], tuple[str, ...]]
) -> Callable[[str], set[int]]:
    """A function from a spoken name to the indices it may mean. A whole name wins over somebody's
    short form."""
    whole: dict[str, set[int]] = {}
    partial: dict[str, set[int]] = {}
    for index, name in enumerate(names):
        whole.setdefault(normalise(name), set()).add(index)
        for form in forms(name):
            partial.setdefault(normalise(form), set()).add(index)

    def find(text: str) -> set[int]:
        key = normalise(text)
        return whole.get(key) or partial.get(key) or set()

    return find


def _one(found: set[int], where: str, *, what: str, valid: Callable[[], list[str]]) -> int:
    if len(found) == 1:
        return next(iter(found))
    problem = f"names no known {what}" if not found else f"names more than one {what}"
    raise _refused(f"{where} {problem}", valid)


def _refused(problem: str, valid: Callable[[], list[str]]) -> PlayerError:
    return PlayerError("bad_proposal", f"{problem}. Free: {', '.join(valid()) or 'none'}")


def _shorten(line: str) -> str:
    return line if len(line) <= _QUOTE_CHARS else line[: _QUOTE_CHARS - 1] + "…"
