"""The records of a matching game: instance, options, public actions, a seat's view; and the best
matchings of a board.

Values are integers from 0 to `max_value` (exclusive). Tables are indexed [reviewer][paper]; masks
and scales are indexed by seat first. The bounds apply to data from files (`dialop.values.parsed`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from dialop.game import PlayerError
from dialop.logged import Move, View
from dialop.matching.proposal import Pairs, normalise, parse_proposal, render_proposal
from dialop.matching.roster import PAPERS, REVIEWERS, first_name, short_title
from dialop.values import Text

Table = tuple[tuple[int, ...], ...]
Mask = tuple[tuple[Literal[0, 1], ...], ...]
Scale = Annotated[float, Field(gt=0)]
Displayed = tuple[tuple[int | None, ...], ...]

MAX_VALUE = 100
MAX_MAX_VALUE = 10_000  # tables are drawn as 8- or 16-bit numbers
# Displayed values have at most six digits, the most that `statements` reads.
_MAX_SHOWN = 1_000_000


@dataclass(frozen=True, slots=True)
class MatchingInstance:
    """One board and each seat's part of it.

    `table[reviewer][paper]` holds the scored values; cells that neither seat sees already have the
    unknown value. `masks[seat][reviewer][paper]` is 1 where the seat sees the cell, and
    `scales[seat]` multiplies the values that the seat sees. `best` is the value of the
    maximum-weight matching; `solo[seat]` is the true value of the plan that is best given only that
    seat's cells; `referenced` computes both. `opening` holds moves made before play starts, from a
    recorded human game.
    """

    key: Text
    size: Annotated[int, Field(ge=2, le=len(REVIEWERS))]
    table: Table
    masks: tuple[Mask, Mask]
    scales: tuple[Scale, Scale]
    first_seat: Annotated[int, Field(ge=0, le=1)]
    best: int | float = 0
    solo: tuple[float, float] = (0.0, 0.0)
    max_value: Annotated[int, Field(ge=2, le=MAX_MAX_VALUE)] = MAX_VALUE
    reviewers: tuple[Text, ...] = ()
    papers: tuple[Text, ...] = ()
    opening: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        for name, rows in (("table", self.table), *(("masks", mask) for mask in self.masks)):
            if len(rows) != self.size or any(len(row) != self.size for row in rows):
                raise ValueError(f"{name} must be {self.size}x{self.size} in {self.key}")
        if not self.reviewers:
            object.__setattr__(self, "reviewers", REVIEWERS[: self.size])
        if not self.papers:
            object.__setattr__(self, "papers", PAPERS[: self.size])

    def check(self) -> None:
        """Raise ValueError if the reference values are wrong.

        `best` is recomputed. A seat may have several equally good solo plans with different true
        values, so `solo` must only be between 0 and `best`.
        """
        self.check_board()
        where, best = f"in {short(self.key)}", best_value(self.table)
        if self.best != best:
            raise ValueError(
                f"best {where} must be {best}, computed from its table, got {self.best}"
            )
        if not all(0 <= solo <= best for solo in self.solo):
            raise ValueError(f"solo {where} must be 0 to {best}, got {self.solo}")

    def check_board(self) -> None:
        """Raise ValueError if the board cannot be played."""
        where = f"in {short(self.key)}"
        for r, row in enumerate(self.table):
            for p, cell in enumerate(row):
                seen = self.masks[0][r][p] or self.masks[1][r][p]
                if not 0 <= cell < self.max_value or not (seen or cell == self.unknown):
                    raise ValueError(
                        f"table[{r}][{p}] {where} must be 0 to {self.max_value - 1}, and the "
                        f"unknown value {self.unknown} if neither seat sees it, got {cell}"
                    )
        if max(self.scales) > (most := _MAX_SHOWN / self.max_value):
            raise ValueError(f"scales {where} must be at most {most:g}, got {self.scales}")
        if (self.reviewers, self.papers) != (REVIEWERS[: self.size], PAPERS[: self.size]):
            _check_names(self.reviewers, self.papers, size=self.size)

    @property
    def unknown(self) -> int:
        """The value of a cell that neither seat sees."""
        return unknown_value(self.max_value)

    @property
    def public_unknown(self) -> int | None:
        """The unknown value on unscaled boards, where the seats may know it; None otherwise."""
        return self.unknown if self.scales == (1.0, 1.0) else None

    def displayed(self, seat: int) -> Displayed:
        """The seat's table: trunc(value x the seat's scale), None for a cell it does not see."""
        scale, mask = self.scales[seat], self.masks[seat]
        return tuple(
            tuple(
                int(value * scale) if visible else None
                for value, visible in zip(*rows, strict=True)
            )
            for rows in zip(self.table, mask, strict=True)
        )

    def value(self, pairs: Pairs) -> int | float:
        """A matching's value: the sum of its cells, in the table's units."""
        return sum(self.table[reviewer][paper] for reviewer, paper in pairs)

    def norm(self, value: float) -> float:
        """A value as a share of `best`; 1 if `best` is 0, because then every matching is best."""
        return float(value / self.best) if self.best else 1.0


@dataclass(frozen=True, slots=True)
class Action(Move):
    """A legal move as both seats know it.

    `text` is the content of a message or proposal, "" for answers. `pairs` is set for proposals.
    """

    pairs: Pairs | None = None


@dataclass(frozen=True, slots=True)
class MatchingView(View):
    """One seat's knowledge.

    `displayed[reviewer][paper]` is in the seat's own scaled units, None for cells it does not see.
    `public_unknown` is the value of cells that neither seat sees, None on boards with hidden
    scales, where a seat could not use it.
    """

    size: int
    reviewers: tuple[str, ...]
    papers: tuple[str, ...]
    displayed: Displayed
    public_unknown: int | None
    log: tuple[Action, ...]
    pending: Pairs | None
    pending_seat: int | None


def unknown_value(max_value: int) -> int:
    """The value of a cell that neither seat sees: the middle of the value range."""
    return max_value // 2


def best_pairs(values: ArrayLike) -> Pairs:
    """A maximum-weight perfect matching of a square table [reviewer, paper], sorted by reviewer.

    By scipy's modified Jonker-Volgenant algorithm (Crouse 2016).
    """
    from scipy.optimize import linear_sum_assignment  # slow to import; settings do not need it

    reviewers, papers = linear_sum_assignment(np.asarray(values), maximize=True)
    return tuple((int(r), int(p)) for r, p in zip(reviewers, papers, strict=True))


def best_value(table: Sequence[Sequence[int]]) -> int:
    """The value of the maximum-weight perfect matching."""
    return sum(table[r][p] for r, p in best_pairs(table))


def solo_value(
    table: Sequence[Sequence[int]], mask: Sequence[Sequence[int]], *, unknown: int
) -> int:
    """The true value of the plan that looks best when all cells outside `mask` have the value
    `unknown`."""
    known = np.where(np.asarray(mask, dtype=bool), np.asarray(table), unknown)
    return sum(table[r][p] for r, p in best_pairs(known))


def referenced(board: MatchingInstance) -> MatchingInstance:
    """The board with `best` and `solo` computed from its table and masks."""
    first, second = (
        float(solo_value(board.table, mask, unknown=board.unknown)) for mask in board.masks
    )
    return replace(board, best=best_value(board.table), solo=(first, second))


def _other_form(names: Sequence[str]) -> str:
    """The end of an error about names that are not in the Unicode form of players' words, and so
    may look equal but differ."""
    for name in names:
        plain = unicodedata.normalize("NFKC", name)
        if plain != name:
            return f"; {name} is {name!a} and must be in the Unicode form NFKC, {plain!a}"
    return ""


def _check_names(reviewers: tuple[str, ...], papers: tuple[str, ...], *, size: int) -> None:
    """Raise ValueError if a proposal written with these names could not be parsed back."""
    name_of_form: dict[str, str] = {}
    for what, names, form in (
        ("reviewers", reviewers, first_name),
        ("papers", papers, short_title),
    ):
        if len(names) != size:
            raise ValueError(f"{what} must be {size} names, got {len(names)}")
        for name in names:
            short_form = normalise(form(name))
            if short_form in name_of_form:
                raise ValueError(
                    f"{what} must have unique short names, got {short(name)} and "
                    f"{short(name_of_form[short_form])}{_other_form(names)}"
                )
            name_of_form[short_form] = name
    pairs = tuple((i, i) for i in range(size))
    for brief in (False, True):
        text = render_proposal(pairs, reviewers, papers=papers, brief=brief)
        try:
            parsed = parse_proposal(text, reviewers, papers=papers, brief=brief)
        except PlayerError as error:
            found = f"reviewers and papers cannot be distinguished: {error!r}"
            raise ValueError(f"{found}{_other_form((*reviewers, *papers))}") from None
        if parsed != pairs:
            raise ValueError("a proposal with these reviewers and papers is not parsed correctly")
