"""What a matching game is made of: instance, options, public actions and a seat's view. Pure data,
no play.

Values are whole numbers from 0 up to `max_value` (exclusive); a table is indexed [reviewer][paper],
masks and scales by seat first. Knows nothing of texts or turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dialop.proposal import Pairs
from dialop.roster import PAPERS, REVIEWERS

Table = tuple[tuple[int, ...], ...]
Displayed = tuple[tuple[int | None, ...], ...]
Kind = Literal["message", "propose", "accept", "reject"]

MAX_VALUE = 100
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
    """An instance from its plain JSON form, lists back to tuples."""
    values = dict(data)
    values["table"] = _rows(values["table"])
    values["masks"] = tuple(_rows(mask) for mask in values["masks"])
    for name in ("scales", "solo", "reviewers", "papers"):
        if name in values:
            values[name] = tuple(values[name])
    values["opening"] = tuple(action_from_dict(action) for action in values.get("opening", ()))
    return MatchingInstance(**values)


def action_from_dict(data: dict[str, Any]) -> Action:
    """A move from its plain JSON form."""
    return Action(data["seat"], data["kind"], data["text"], pairs_from_lists(data["pairs"]))


def pairs_from_lists(pairs: Any) -> Pairs | None:
    """A proposal's pairs from their plain JSON form."""
    return None if pairs is None else tuple((reviewer, paper) for reviewer, paper in pairs)


def _rows(rows: Any) -> Table:
    return tuple(tuple(row) for row in rows)
