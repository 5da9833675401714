"""Random mediation instances, each a pure function of (recipe, seed, index).

Source of the distribution: DialOp's released generator. Events begin at half hours from 9:00 to
20:30, each with probability `p_event` unless the previous event still runs, for 30, 60, 120 or 240
minutes. Flights depart in a uniform minute of the window, take about the same whole number of hours
for one user, and cost max(50, normal(m, m)). Flights that overlap no event of their user are
dropped, so each choice costs something. Small instances fix the numbers of events and flights.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np

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
    checked_int,
)
from dialop.mediation.score import clashes
from dialop.mediation.search import with_references

CARRIERS = ("JetBlue", "American", "Delta", "Southwest", "United", "Alaska")
_LENGTHS = (30, 60, 120, 240)
_DAY = 24 * 60
_OPENS, _CLOSES = 9 * 60, 19 * 60  # the window, on its first and on its last day
_LAST_START = 20 * 60 + 30
_LEAST_PRICE = 50
_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class MediationRecipe:
    """The distribution of instances. The defaults are those of the released game.

    - `days`: length of the window, from 9:00 of the first day to 19:00 of the last.
    - `flights`: flights drawn for each user, before those without a conflict are dropped.
    - `keep_flights`: exactly this many of the rest are kept, at random; 0 keeps all.
    - `events`: exactly this many of a drawn calendar's events are kept, at random; 0 keeps all.
    - `p_event`, `p_shared`: the probability of an event at a free half hour, and the share of
      events whose times the agent sees, rounded down.
    - `max_price_pref`, `max_arrival_pref`: the weights are uniform from 1 up to these; 0 means that
      the term does not count.
    """

    days: int = 3
    flights: int = 30
    keep_flights: int = 0
    events: int = 0
    p_event: float = 0.35
    p_shared: float = 0.75
    max_price_pref: int = MAX_PRICE_PREF
    max_arrival_pref: int = MAX_ARRIVAL_PREF

    def __post_init__(self) -> None:
        checked_int(self.days, "days", low=1, high=MAX_DAYS)
        checked_int(self.flights, "flights", low=1, high=MAX_ITEMS)
        checked_int(self.keep_flights, "keep_flights", low=0, high=self.flights)
        checked_int(self.events, "events", low=0, high=8 * self.days)
        if not 0 < self.p_event <= 1:
            raise ValueError(f"p_event must lie above 0 and up to 1, got {self.p_event}")
        if not 0 <= self.p_shared <= 1:
            raise ValueError(f"p_shared must be 0 to 1, got {self.p_shared}")
        checked_int(self.max_price_pref, "max_price_pref", low=0, high=MAX_PRICE_PREF)
        checked_int(self.max_arrival_pref, "max_arrival_pref", low=0, high=MAX_ARRIVAL_PREF)


def generate_instance(recipe: MediationRecipe, *, seed: int, index: int) -> MediationInstance:
    """Instance `index` of the stream `seed`, the same in every process and for every batch size.

    Instances in which all pairs of flights score the same are drawn again.

    Raises:
        ValueError: for a negative seed or index, or a recipe that hardly any draw meets.
    """
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must be at least 0, got {seed} and {index}")
    rng = np.random.default_rng((seed, index))
    for _ in range(_MAX_DRAWS):
        arrival_pref = _weight(recipe.max_arrival_pref, rng)
        first, second = _user(recipe, rng), _user(recipe, rng)
        if first is None or second is None:
            continue
        instance = MediationInstance(
            key=f"{seed}/{index}",
            users=(first, second),
            arrival_pref=arrival_pref,
            best=0,
            worst=0,
            alone=0,
            max_price_pref=recipe.max_price_pref,
            max_arrival_pref=recipe.max_arrival_pref,
        )
        best, worst, alone = with_references(instance)
        if best > worst:
            return replace(instance, best=best, worst=worst, alone=alone)
    raise ValueError(f"none of {_MAX_DRAWS} drawn instances meets {recipe}")


def generate_many(
    recipe: MediationRecipe, *, seed: int, num: int, start: int = 0, processes: int = 1
) -> list[MediationInstance]:
    """Instances `start` up to `start + num` of the stream `seed`, in order."""
    if num < 0 or processes < 1:
        raise ValueError(f"num must be at least 0 and processes 1, got {num} and {processes}")
    indices = range(start, start + num)
    if processes == 1:
        return [generate_instance(recipe, seed=seed, index=index) for index in indices]
    chunk = max(1, min(64, num // (4 * processes)))
    jobs = [(recipe, seed, indices[i : i + chunk]) for i in range(0, num, chunk)]
    # Spawn, because forking a process with running threads (torch, an engine) can hang.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [instance for part in pool.map(_generate_job, jobs) for instance in part]


def _generate_job(job: tuple[MediationRecipe, int, range]) -> list[MediationInstance]:
    recipe, seed, indices = job
    return [generate_instance(recipe, seed=seed, index=index) for index in indices]


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
    """A calendar in order of time; none if it has fewer than `recipe.events` events."""
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
    """All drawn flights of a user, by arrival."""
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
