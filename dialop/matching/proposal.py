"""Parses and renders proposals: one `paper: reviewer` line per paper.

Parsing is lenient; rendering has one canonical form. A matching is a tuple of (reviewer, paper)
pairs, sorted by reviewer, where both numbers are indices into the board's names.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

from dialop.game import PlayerError
from dialop.matching.roster import display_names, paper_forms, reviewer_forms
from dialop.specs import folded

Pairs = tuple[tuple[int, int], ...]

_BREAK = re.compile(r"<br\s*/?>|\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", re.IGNORECASE)
_HEADER = re.compile(r"^[\W_]*proposal[\s*_#]*(?::[\s*_]*|$)", re.IGNORECASE)
_NUMBERING = re.compile(r"^[\W_]*\d+\s*[.):]\s*")
_WORD = re.compile(r"[^\W_]+")
# Numeric HTML character references with too many digits: Python refuses to convert long numbers.
_LONG_REFERENCE = re.compile(r"&#(?:\d{8,}|x[\da-f]{8,});?", re.IGNORECASE)
_QUOTE_CHARS = 40
_MAX_LINE = 1000  # characters; several times the length of a line with two names


def parse_proposal(
    text: str, reviewers: Sequence[str], *, papers: Sequence[str], brief: bool = False
) -> Pairs:
    """Parse a proposal as a perfect matching of `reviewers` and `papers`.

    Lines end at a newline or `<br/>`. A `Proposal:` header, bullets, numbering, `&emsp;`, markdown
    emphasis and case are ignored. A line is split at its last colon, because full titles may
    contain colons.

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
    """Write a matching as text, ordered by paper, or in the order of `pairs` if `as_given`.

    It has a `Proposal:` header and full reviewer names, or no header and first names if `brief`.
    """
    shown_reviewers, shown_papers = display_names(reviewers, papers, brief=brief)
    lines = [] if brief else ["Proposal:"]
    ordered = pairs if as_given else sorted(pairs, key=lambda pair: pair[1])
    for reviewer, paper in ordered:
        lines.append(f"{shown_papers[paper]}: {shown_reviewers[reviewer]}")
    return "\n".join(lines)


def normalise(text: str) -> str:
    """The text's words in lower case, joined by single spaces; all other characters are dropped."""
    return " ".join(_WORD.findall(folded(text)))


def _lines(text: str) -> list[str]:
    """The pair lines of a proposal, without headers, numbering and lines without a letter or
    digit."""
    lines = [_plain(line) for line in _BREAK.split(text)]
    lines = [line.strip() for line in lines if normalise(line)]
    if lines:
        lines[0] = _HEADER.sub("", lines[0])
    lines = [_NUMBERING.sub("", line) for line in lines]
    return [line for line in lines if normalise(line)]


def _plain(line: str) -> str:
    """A line with decoded character references, in the Unicode form NFKC.

    A line that is too long to be accepted is returned unchanged, because the time to order
    combining marks grows with the square of their number.
    """
    if len(line) > _MAX_LINE:
        return line
    return unicodedata.normalize("NFKC", html.unescape(_LONG_REFERENCE.sub("\ufffd", line)))


@lru_cache(maxsize=16)
def _lookup(
    names: tuple[str, ...], forms: Callable[[str], tuple[str, ...]]
) -> Callable[[str], set[int]]:
    """A function from a written name to the indices that it may mean.

    A match with a full name takes precedence over matches with short forms.
    """
    by_full_name, by_any_form = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for index, name in enumerate(names):
        by_full_name[normalise(name)].add(index)
        for form in forms(name):
            by_any_form[normalise(form)].add(index)

    def find(text: str) -> set[int]:
        key = normalise(text)
        return by_full_name.get(key) or by_any_form.get(key) or set()

    return find


def _one(matches: set[int], where: str, *, what: str, valid: Callable[[], list[str]]) -> int:
    if len(matches) == 1:
        return next(iter(matches))
    problem = f"names no known {what}" if not matches else f"names more than one {what}"
    raise _refused(f"{where} {problem}", valid)


def _refused(problem: str, valid: Callable[[], list[str]]) -> PlayerError:
    return PlayerError("bad_proposal", f"{problem}. Free: {', '.join(valid()) or 'none'}")


def _shorten(line: str) -> str:
    return line if len(line) <= _QUOTE_CHARS else line[: _QUOTE_CHARS - 1] + "…"
