"""What a matching game is made of: instance, options, public actions and a seat's view. Pure data,
no play.

Values are whole numbers from 0 up to `max_value` (exclusive); a table is indexed [reviewer][paper],
masks and scales by seat first. Knows nothing of texts or turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Literal

from dialop.game import PlayerError
from dialop.matching.proposal import Pairs, normalise, parse_proposal, render_proposal
from dialop.matching.roster import PAPERS, REVIEWERS, first_name, short_title
from dialop.matching.solve import best_value

Table = tuple[tuple[int, ...], ...]
Displayed = tuple[tuple[int | None, ...], ...]
Kind = Literal["message", "propose", "accept", "reject"]

MAX_VALUE = 100
MAX_MAX_VALUE = 10_000  # tables are drawn as 8- or 16-bit numbers
# A shown value has at most six digits, as many as `statements` reads.
_MAX_SHOWN = 1_000_000
_MAX_NAME = 200  # characters of a key or a name
KINDS: tuple[Kind, ...] = ("message", "propose", "accept", "reject")


@dataclass(frozen=True, slots=True)
class MatchingInstance:
    """One board and what each seat sees of it.

    `table[reviewer][paper]` holds the scored values, cells that neither seat sees already replaced
    by the unknown value; `masks[seat][reviewer][paper]` is 1 where the seat sees the cell;
    `scales[seat]` multiplies what it sees; `best` is the maximum-weight matching of the table and
    `solo[seat]` the true value of the plan from that seat's cells alone. `opening` is what was said
    and done before the game is played on: people's first moves, where it starts from theirs.
    """

    key: str
    size: int
    table: Table
    masks: tuple[Table, Table]
    scales: tuple[float, float]
    first_seat: int
    best: int | float
    solo: tuple[float, float]
    max_value: int = MAX_VALUE
    reviewers: tuple[str, ...] = ()
    papers: tuple[str, ...] = ()
    opening: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if not 2 <= self.size <= len(REVIEWERS):
            raise ValueError(f"size must be 2 to {len(REVIEWERS)}, got {self.size} in {self.key}")
        if self.first_seat not in (0, 1):
            raise ValueError(f"first_seat must be 0 or 1, got {self.first_seat} in {self.key}")
        for name, rows in (("table", self.table), *(("masks", mask) for mask in self.masks)):
            if len(rows) != self.size or any(len(row) != self.size for row in rows):
                raise ValueError(f"{name} must be {self.size}x{self.size} in {self.key}")
        if not self.reviewers:
            object.__setattr__(self, "reviewers", REVIEWERS[: self.size])
        if not self.papers:
            object.__setattr__(self, "papers", PAPERS[: self.size])

    def check(self) -> None:
        """Raise ValueError where the board cannot be played, or its figures are not its own.

        For boards from outside: a file may hold any numbers under these names. Types are checked
        cell by cell, and `best` is solved again. A solo plan may be any of several equal ones, so
        `solo` is only held to lie between 0 and the best.
        """
        where = f"in {short(self.key)}"
        _check_name(self.key, "key")
        whole(self.max_value, f"max_value {where}", low=2, high=MAX_MAX_VALUE)
        whole(self.first_seat, f"first_seat {where}", low=0, high=1)
        parts = [("table", self.table, self.max_value - 1)]
        parts += [(f"masks[{seat}]", mask, 1) for seat, mask in enumerate(self.masks)]
        for name, rows, most in parts:
            for r, row in enumerate(rows):
                for p, cell in enumerate(row):
                    whole(cell, f"{name}[{r}][{p}] {where}", low=0, high=most)
        for r, row in enumerate(self.table):
            for p, cell in enumerate(row):
                if not self.masks[0][r][p] and not self.masks[1][r][p] and cell != self.unknown:
                    raise ValueError(
                        f"table[{r}][{p}] {where}, a cell that neither seat sees, must be "
                        f"{self.unknown}, the middle of the values, got {cell}"
                    )
        most_scale = _MAX_SHOWN / self.max_value
        for seat, scale in enumerate(self.scales):
            if not _is_number(scale) or not 0 < scale <= most_scale:
                raise ValueError(
                    f"scales[{seat}] {where} must lie above 0 and up to {most_scale:g}, "
                    f"got {short(scale)}"
                )
        best = best_value(self.table)
        if not _is_number(self.best) or self.best != best:
            raise ValueError(
                f"best {where} must be {best}, the most its table gives, got {short(self.best)}"
            )
        for seat, solo in enumerate(self.solo):
            if not _is_number(solo) or not 0 <= solo <= best:
                raise ValueError(f"solo[{seat}] {where} must be 0 to {best}, got {short(solo)}")
        if (self.reviewers, self.papers) != (REVIEWERS[: self.size], PAPERS[: self.size]):
            _check_names(self.reviewers, self.papers, size=self.size)

    @property
    def unknown(self) -> int:
        """The value of a cell that neither seat sees."""
        return unknown_value(self.max_value)

    @property
    def public_unknown(self) -> int | None:
        """The unknown value where seats may be told it: only on boards whose values are shown
        unscaled."""
        return self.unknown if self.scales == (1.0, 1.0) else None

    def displayed(self, seat: int) -> Displayed:
        """What a seat sees: trunc(value x own scale), None for an unseen cell."""
        scale, mask = self.scales[seat], self.masks[seat]
        return tuple(
            tuple(int(value * scale) if seen else None for value, seen in zip(*rows, strict=True))
            for rows in zip(self.table, mask, strict=True)
        )

    def value(self, pairs: Pairs) -> int | float:
        """The sum of the table over a matching's cells, in the table's units."""
        return sum(self.table[reviewer][paper] for reviewer, paper in pairs)

    def norm(self, value: float) -> float:
        """A value as a share of the best; on a board worth nothing every matching is the best
        one."""
        return float(value / self.best) if self.best else 1.0


@dataclass(frozen=True, slots=True)
class MatchingOptions:
    """How the game is played: `[message]` allowed, brief texts, private text before the tag
    allowed."""

    messages: bool = True
    brief: bool = False
    private_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """A legal move as both seats know it: its content for messages and proposals, the pairs of a
    proposal."""

    seat: int
    kind: Kind
    text: str
    pairs: Pairs | None = None


@dataclass(frozen=True, slots=True)
class MatchingView:
    """What one seat may know. `displayed[reviewer][paper]` is in the seat's own scaled units, None
    where unseen.

    `public_unknown` is the value of cells nobody sees, None where hidden scales make it meaningless
    to a seat.
    """

    seat: int
    size: int
    reviewers: tuple[str, ...]
    papers: tuple[str, ...]
    displayed: Displayed
    public_unknown: int | None
    log: tuple[Action, ...]
    pending: Pairs | None
    pending_seat: int | None
    to_move: int | None
    num_errors_this_turn: int
    options: MatchingOptions


def unknown_value(max_value: int) -> int:
    """What a cell that neither seat sees is worth: the middle of 0 up to `max_value`, exclusive."""
    return max_value // 2


def instance_from_dict(data: dict[str, Any]) -> MatchingInstance:
    """An instance from its plain JSON form, lists back to tuples, checked.

    Raises:
        ValueError: for values that are no board; names the field, its rule and what was seen.
    """
    missing = [name for name in _REQUIRED if data.get(name) is None]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    values = dict(data)
    whole(values["size"], "size", low=2, high=len(REVIEWERS))
    values["table"] = rows_of(values["table"], "table")
    values["masks"] = tuple(rows_of(mask, "masks") for mask in _pair(values["masks"], "masks"))
    for name in ("scales", "solo"):
        values[name] = _pair(values[name], name)
    for name in ("reviewers", "papers"):
        if name in values:
            values[name] = _list(values[name], name)
    values["opening"] = tuple(action_from_dict(action) for action in values.get("opening", ()))
    instance = MatchingInstance(**values)
    instance.check()
    return instance


def action_from_dict(data: dict[str, Any]) -> Action:
    """A move from its plain JSON form."""
    return Action(data["seat"], data["kind"], data["text"], pairs_from_lists(data["pairs"]))


def pairs_from_lists(pairs: Any) -> Pairs | None:
    """A proposal's pairs from their plain JSON form."""
    return None if pairs is None else tuple((reviewer, paper) for reviewer, paper in pairs)


def rows_of(rows: Any, name: str) -> Table:
    """Rows of a JSON or parquet value as tuples. Raises ValueError for what is no list of lists."""
    return tuple(_list(row, f"a row of {name}") for row in _list(rows, name))


def whole(value: Any, name: str, *, low: int, high: int) -> int:
    """The value, where it is a whole number in these bounds; raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {short(value)}")
    return value


_REQUIRED = ("key", "size", "table", "masks", "scales", "first_seat", "best", "solo")


def _list(value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list, got {short(value)}")
    return tuple(value)


def _pair(value: Any, name: str) -> tuple[Any, Any]:
    items = _list(value, name)
    if len(items) != 2:
        raise ValueError(f"{name} must be two, one a seat, got {len(items)}")
    return items[0], items[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_name(value: Any, name: str) -> None:
    """Raise ValueError for what is no name to be read on one line."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"{name} must be printable text on one line, got {short(value)}")
    if len(value) > _MAX_NAME:
        raise ValueError(f"{name} must have at most {_MAX_NAME} characters, got {len(value)}")


def _check_names(reviewers: tuple[str, ...], papers: tuple[str, ...], *, size: int) -> None:
    """Raise ValueError where a proposal in these names could not be read back as it was meant."""
    meant: dict[str, str] = {}
    for what, names, form in (
        ("reviewers", reviewers, first_name),
        ("papers", papers, short_title),
    ):
        if len(names) != size:
            raise ValueError(f"{what} must be {size} names, got {len(names)}")
        for name in names:
            _check_name(name, what)
            spoken = normalise(form(name))
            if spoken in meant:
                raise ValueError(
                    f"{what} must differ in the short names that are said, got {short(name)} "
                    f"beside {short(meant[spoken])}"
                )
            meant[spoken] = name
    pairs = tuple((i, i) for i in range(size))
    for brief in (False, True):
        text = render_proposal(pairs, reviewers, papers=papers, brief=brief)
        try:
            read = parse_proposal(text, reviewers, papers=papers, brief=brief)
        except PlayerError as error:
            raise ValueError(f"reviewers and papers cannot be told apart: {error!r}") from None
        if read != pairs:
            raise ValueError("reviewers and papers must be read back from a proposal, are not")
