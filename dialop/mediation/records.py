"""The records of mediation: instance, options, moves, and each seat's knowledge. Pure data.

Times are whole minutes from 00:00 of the first day (`FIRST_DAY`). Prices are whole dollars.
Importances and weights have no unit; costs are negative, in the score's points. Seats 0 and 1 are
the users, seat 2 is the agent; room `i` has user `i` and the agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Annotated

from pydantic import Field

from dialop.logged import Move, View
from dialop.values import Text

FIRST_DAY = date(2023, 5, 31)
USERS = (0, 1)
AGENT = 2
NUM_SEATS = 3
Pair = tuple[int, int]

MAX_DAYS = 30
MAX_MINUTE = (MAX_DAYS + 3) * 24 * 60
MAX_IMPORTANCE = 10
MAX_PRICE_PREF = 20
MAX_ARRIVAL_PREF = 10
MAX_PRICE = 1_000_000
MAX_ITEMS = 200  # flights or events of one user
Minute = Annotated[int, Field(ge=0, le=MAX_MINUTE)]
Dollars = Annotated[int, Field(ge=0, le=MAX_PRICE)]
PricePref = Annotated[int, Field(ge=0, le=MAX_PRICE_PREF)]
ArrivalPref = Annotated[int, Field(ge=0, le=MAX_ARRIVAL_PREF)]


@dataclass(frozen=True, slots=True)
class Event:
    """A calendar entry [start, end). The agent sees only the times of shared events."""

    start: Minute
    end: Minute
    importance: Annotated[int, Field(ge=1, le=MAX_IMPORTANCE)]
    shared: bool

    def __post_init__(self) -> None:
        _check_span(self.start, self.end)


@dataclass(frozen=True, slots=True)
class Flight:
    """A bookable flight; its id is its index in the user's list."""

    carrier: Text
    start: Minute
    end: Minute
    price: Dollars

    def __post_init__(self) -> None:
        _check_span(self.start, self.end)


@dataclass(frozen=True, slots=True)
class User:
    """A user's private data: events, flights, and the weight of the price.

    `mean_price` is the price at which the price term is 0; neither the users nor the agent see it
    or `price_pref`.
    """

    events: Annotated[tuple[Event, ...], Field(min_length=0, max_length=MAX_ITEMS)]
    flights: Annotated[tuple[Flight, ...], Field(min_length=1, max_length=MAX_ITEMS)]
    mean_price: Annotated[int, Field(ge=1, le=MAX_PRICE)]
    price_pref: PricePref


@dataclass(frozen=True, slots=True)
class MediationInstance:
    """One pair of users. `best` and `worst` are the extreme scores over all pairs of flights.

    `alone` is the score of the pair that the agent books without messages; `score.referenced`
    computes these three. `max_price_pref` and `max_arrival_pref` bound the hidden weights; all
    seats know the bounds. `opening` holds moves made before play starts, taken from a recorded
    human game.
    """

    key: Text
    users: tuple[User, User]
    arrival_pref: ArrivalPref
    best: int = 0
    worst: int = 0
    alone: int = 0
    max_price_pref: PricePref = MAX_PRICE_PREF
    max_arrival_pref: ArrivalPref = MAX_ARRIVAL_PREF
    opening: tuple[Act, ...] = ()

    def norm(self, score: float) -> float:
        """A score's place between `worst` (0) and `best` (1); 1 if all pairs are equally good."""
        spread = self.best - self.worst
        return (score - self.worst) / spread if spread else 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """A flight's three terms for one user, in points. Only the price term can be positive."""

    calendar: int
    price: int
    arrival: int

    @property
    def total(self) -> int:
        return self.calendar + self.price + self.arrival


@dataclass(frozen=True, slots=True)
class Act(Move):
    """A legal move.

    `room` is where a message or an answer was given, None for a proposal, which goes to both rooms.
    `flights` has a proposal's flight ids by user. In a user's view the other user's id is -1, and
    `costs` has the user's own terms; elsewhere `costs` is None.
    """

    room: int | None
    flights: Pair | None = None
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class UserView(View):
    """A user's knowledge.

    `calendar_costs[flight]` is minus the importance of all own events that overlap the flight.
    `flights` and `events` are empty in the brief style, whose texts show only these costs. `log`
    has the moves of the user's own room and the proposals.
    """

    calendar_costs: tuple[int, ...]
    flights: tuple[Flight, ...]
    events: tuple[Event, ...]
    log: tuple[Act, ...]
    answer_due: bool
    max_price_pref: int
    max_arrival_pref: int


@dataclass(frozen=True, slots=True)
class AgentView(View):
    """The agent's knowledge, by user.

    `conflicts[user][flight]` counts the shared events that overlap the flight; `prices` and
    `arrivals` belong to the flights. In the brief style a column whose weight has the bound 0 is
    all zeros. `flights` and `shared` (only times) are empty in the brief style.
    """

    conflicts: tuple[tuple[int, ...], ...]
    prices: tuple[tuple[int, ...], ...]
    arrivals: tuple[tuple[int, ...], ...]
    flights: tuple[tuple[Flight, ...], ...]
    shared: tuple[tuple[tuple[int, int], ...], ...]
    log: tuple[Act, ...]
    max_price_pref: int
    max_arrival_pref: int


def _check_span(start: int, end: int) -> None:
    if end <= start:
        raise ValueError(f"start must be before end, got {start} and {end}")
