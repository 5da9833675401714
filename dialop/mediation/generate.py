"""Random mediation instances, each a pure function of (recipe, seed, index).

Source of the distribution: DialOp's released generator. Events start at half hours from 9:00 to
20:30, each with probability `p_event` unless the previous event still runs, for 30, 60, 120 or 240
minutes. Flights depart in a uniform minute of the window. A user's flights take about the same
whole number of hours and cost max(50, normal(m, m)). Flights that overlap no event of their user
are dropped, so every choice has a cost. Small instances fix the numbers of events and flights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dialop.kit import check_options, option, stream_rng
from dialop.mediation.records import (
    MAX_ARRIVAL_PREF,
    MAX_DAYS,
    MAX_IMPORTANCE,
    MAX_ITEMS,
    MAX_PRICE_PREF,
    Event,
    Flight,
    MediationInstance,
    User,
)
from dialop.mediation.score import clashes, referenced
from dialop.values import checked_int

CARRIERS = ("JetBlue", "American", "Delta", "Southwest", "United", "Alaska")
_LENGTHS = (30, 60, 120, 240)
_DAY = 24 * 60
_OPENS, _CLOSES = 9 * 60, 19 * 60  # the window, on its first and on its last day
_LAST_START = 20 * 60 + 30
_LEAST_PRICE = 50
_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class MediationRecipe:
    """The distribution of instances. The defaults equal the released game's."""

    days: int = option(
        3,
        "length of the window, from 9:00 of the first day to 19:00 of the last",
        low=1,
        high=MAX_DAYS,
    )
    flights: int = option(
        30,
        "flights drawn for each user; those that overlap no event are dropped",
        low=1,
        high=MAX_ITEMS,
    )
    keep_flights: int = option(
        0, "keep exactly this many of the remaining flights; 0 keeps all", low=0, high=MAX_ITEMS
    )
    events: int = option(
        0, "keep exactly this many events of each user; 0 keeps all", low=0, high=8 * MAX_DAYS
    )
    p_event: float = option(0.35, "probability of an event at a free half hour", low=0.01, high=1.0)
    p_shared: float = option(
        0.75, "share of the events whose times the agent sees, rounded down", low=0.0, high=1.0
    )
    max_price_pref: int = option(
        MAX_PRICE_PREF,
        "the users' price weights are 1 to this; 0 means that prices do not count",
        low=0,
        high=MAX_PRICE_PREF,
    )
    max_arrival_pref: int = option(
        MAX_ARRIVAL_PREF,
        "the arrival weight is 1 to this; 0 means that arrivals do not count",
        low=0,
        high=MAX_ARRIVAL_PREF,
    )

    def __post_init__(self) -> None:
        check_options(self)
        checked_int(self.keep_flights, "keep_flights", low=0, high=self.flights)
        checked_int(self.events, "events", low=0, high=8 * self.days)


def generate_instance(recipe: MediationRecipe, *, seed: int, index: int) -> MediationInstance:
    """Instance `index` of the stream `seed`, the same in every process and for every batch size.

    An instance whose pairs of flights all score the same is drawn again.

    Raises:
        ValueError: for a negative seed or index, or a recipe that almost no draw meets.
    """
    rng = stream_rng(seed, index)
    for _ in range(_MAX_DRAWS):
        arrival_pref = _weight(recipe.max_arrival_pref, rng)
        first, second = _user(recipe, rng), _user(recipe, rng)
        if first is None or second is None:
            continue
        instance = referenced(
            MediationInstance(
                key=f"{seed}/{index}",
                users=(first, second),
                arrival_pref=arrival_pref,
                max_price_pref=recipe.max_price_pref,
                max_arrival_pref=recipe.max_arrival_pref,
            )
        )
        if instance.best > instance.worst:
            return instance
    raise ValueError(f"none of {_MAX_DRAWS} drawn instances meets {recipe}")


def _user(recipe: MediationRecipe, rng: np.random.Generator) -> User | None:
    """One user's data; None if too few events or flights are left."""
    events = _events(recipe, rng)
    mean_price = int(rng.integers(50, 1000))
    flights = _flights(recipe, mean_price, rng)
    price_pref = _weight(recipe.max_price_pref, rng)
    if not events:
        return None
    num_conflicts = clashes(events, flights).sum(axis=1)
    left = [flight for flight, num in zip(flights, num_conflicts, strict=True) if num]
    if len(left) < max(1, recipe.keep_flights):
        return None
    if recipe.keep_flights:
        chosen = sorted(rng.choice(len(left), size=recipe.keep_flights, replace=False).tolist())
        left = [left[i] for i in chosen]
    return User(tuple(events), tuple(left), mean_price, price_pref)


def _events(recipe: MediationRecipe, rng: np.random.Generator) -> list[Event]:
    """A calendar in order of time; empty if it has fewer than `recipe.events` events."""
    spans, free_from = [], 0
    end = (recipe.days - 1) * _DAY + _CLOSES
    for time in range(_OPENS, end, 30):
        if not _OPENS <= time % _DAY <= _LAST_START or time < free_from:
            continue
        if rng.random() < recipe.p_event:
            free_from = time + _LENGTHS[rng.integers(len(_LENGTHS))]
            spans.append((time, free_from, int(rng.integers(1, MAX_IMPORTANCE + 1))))
    if len(spans) < recipe.events:
        return []
    if recipe.events:
        chosen = sorted(rng.choice(len(spans), size=recipe.events, replace=False).tolist())
        spans = [spans[i] for i in chosen]
    num_shared = int(len(spans) * recipe.p_shared)
    shared = set(rng.choice(len(spans), size=num_shared, replace=False).tolist())
    return [Event(*span, shared=i in shared) for i, span in enumerate(spans)]


def _flights(recipe: MediationRecipe, mean_price: int, rng: np.random.Generator) -> list[Flight]:
    """All drawn flights of a user, ordered by arrival."""
    end = (recipe.days - 1) * _DAY + _CLOSES
    hours = 60 * int(rng.integers(1, 11))
    num = recipe.flights
    starts = rng.integers(_OPENS, end, size=num)
    ends = starts + hours + np.floor(rng.exponential(size=num)).astype(np.int64)
    prices = np.maximum(_LEAST_PRICE, np.rint(rng.normal(mean_price, mean_price, size=num)))
    carriers = rng.integers(len(CARRIERS), size=num)
    order = np.argsort(ends, kind="stable")
    return [
        Flight(CARRIERS[carriers[i]], int(starts[i]), int(ends[i]), int(prices[i])) for i in order
    ]


def _weight(highest: int, rng: np.random.Generator) -> int:
    return int(rng.integers(1, highest + 1)) if highest else 0
