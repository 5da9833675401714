"""Parses the statements in a user's message: costs of flights, terms of a proposal, events.

Brief: a line of two numbers is a flight's id and its calendar cost, a line of three the terms
(calendar, price, arrival) of the last proposal. Full: "id 3 costs 7", "calendar -7, price 3,
arrival -2" and an event in the form of the lists. Other text is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from typing import NamedTuple

from dialop.clauses import NUMBER_END, is_stated
from dialop.mediation.records import FIRST_DAY, Act, Costs, UserView
from dialop.mediation.score import overlap

_PAIR = re.compile(r"^[ \t]*(\d{1,3}) +(-?\d{1,3})[ \t]*$", re.MULTILINE)
_TRIPLE = re.compile(r"^[ \t]*(-?\d{1,4}) (-?\d{1,4}) (-?\d{1,4})[ \t]*$", re.MULTILINE)
_COSTS = re.compile(
    rf"\b(?:id|flight) (\d{{1,3}})(?: costs(?: me)?|:| is| =) ?(\d{{1,3}}){NUMBER_END}",
    re.IGNORECASE,
)
_TERMS = re.compile(
    r"\bcalendar (-?\d{1,4}), price (-?\d{1,4}),? (?:and )?arrival (-?\d{1,4})" + NUMBER_END,
    re.IGNORECASE,
)
_TIME = r"(\d{1,2})/(\d{1,2}) (\d{1,2}):(\d{2}) ([AP])M"
_EVENT = re.compile(rf"\((\d{{1,2}})\) {_TIME} - {_TIME}")


class Span(NamedTuple):
    """A stated event: times in minutes as in records.py, and its importance."""

    start: int
    end: int
    importance: int


class Statements(NamedTuple):
    """A message's statements, in order: {flight: calendar cost}, terms, events.

    A later statement about the same flight replaces an earlier one.
    """

    costs: dict[int, int]
    terms: Costs | None
    events: tuple[Span, ...]


@lru_cache(maxsize=4096)  # players read the same messages again on each of their turns
def read_statements(text: str, brief: bool) -> Statements:
    """The statements of one message."""
    if brief:
        pairs, terms, events = _PAIR.findall(text), _TRIPLE.findall(text), []
    else:
        pairs, terms, events = (
            [m.groups() for m in pattern.finditer(text) if is_stated(text, *m.span())]
            for pattern in (_COSTS, _TERMS, _EVENT)
        )
    costs = {int(flight): int(cost) * (1 if brief else -1) for flight, cost in pairs}
    spans = tuple(span for event in events if (span := _span(event)) is not None)
    return Statements(costs, Costs(*map(int, terms[-1])) if terms else None, spans)


def count_true(view: UserView, text: str, log: Sequence[Act]) -> tuple[int, int]:
    """The number of true statements in a user's message, and the number of all statements.

    `view` is the user's view, `log` has the moves before the message that it knows. Costs of
    missing flights, terms without a proposal, and events outside the user's calendar are not true.
    """
    stated = read_statements(text, view.options.brief)
    own = view.calendar_costs
    true = [flight < len(own) and own[flight] == cost for flight, cost in stated.costs.items()]
    events = {(event.start, event.end, event.importance) for event in view.events}
    true += [tuple(span) in events for span in stated.events]
    if stated.terms is not None:
        proposed = [act.costs for act in log if act.costs is not None]
        true.append(bool(proposed) and proposed[-1] == stated.terms)
    return sum(true), len(true)


def cost_of_events(events: Sequence[Span], flight: tuple[int, int]) -> int:
    """The calendar cost that these events give a flight (departure, arrival)."""
    return -sum(e.importance for e in events if overlap((e.start, e.end), flight))


def _span(match: tuple[str, ...]) -> Span | None:
    start, end = _minute(match[1:6]), _minute(match[6:11])
    return None if start is None or end is None else Span(start, end, int(match[0]))


def _minute(match: tuple[str, ...]) -> int | None:
    month, day, hour, minutes = map(int, match[:4])
    try:
        days = (date(FIRST_DAY.year, month, day) - FIRST_DAY).days
    except ValueError:
        return None
    hour = hour % 12 + (12 if match[4].upper() == "P" else 0)
    return days * 24 * 60 + hour * 60 + minutes
