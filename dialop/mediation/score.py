"""The score of mediation: each user's three terms, and all pairs of flights at once.

For user i with flight f, in points: calendar = -(sum of the importance of all own events that
overlap f); price = trunc(-price_pref x (price - mean_price) / mean_price); arrival =
trunc(-arrival_pref x gap / 3), where gap is the whole hours between the two arrivals, rounded down.
The score is the sum of the six terms, so the arrival term counts twice. Source: DialOp's released
game. Quotients are exact here; its floating-point terms are one point off in rare cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialop.mediation.records import (
    MAX_IMPORTANCE,
    Costs,
    Event,
    Flight,
    MediationInstance,
    Pair,
    User,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MEAN_IMPORTANCE = (1 + MAX_IMPORTANCE) / 2
# Prices are max(50, normal(m, m)), whose mean is close to m (P(Z < 1) + p(1)) = 1.083 m.
MEAN_OF_PRICES = 1.083


def overlap(event: tuple[int, int], flight: tuple[int, int]) -> bool:
    """Whether two time spans overlap: one starts strictly inside the other.

    An event that starts in the same minute as the flight does not overlap it, as in the scores of
    the recorded games.
    """
    return event[0] < flight[0] < event[1] or flight[0] < event[0] < flight[1]


def conflicts(user: User, flight: Flight) -> list[Event]:
    """The user's events that overlap the flight."""
    return [e for e in user.events if overlap((e.start, e.end), (flight.start, flight.end))]


def calendar_costs(user: User) -> Ints:
    """The calendar term of each flight [F]."""
    weights = np.array([event.importance for event in user.events], dtype=np.int64)
    return -(clashes(user.events, user.flights) @ weights)


def shared_conflicts(user: User) -> Ints:
    """The number of shared events that overlap each flight [F]."""
    shared = [event for event in user.events if event.shared]
    return clashes(shared, user.flights).sum(axis=1)


def clashes(events: Any, flights: Any) -> Ints:
    """1 where a flight [F] overlaps an event [E], 0 elsewhere: [F, E]."""
    start_E, end_E = (np.array([getattr(e, n) for e in events], np.int64) for n in ("start", "end"))
    start_F, end_F = (
        np.array([getattr(f, n) for f in flights], np.int64)[:, None] for n in ("start", "end")
    )
    inside = (start_E < start_F) & (start_F < end_E)
    around = (start_F < start_E) & (start_E < end_F)
    return (inside | around).astype(np.int64)


def price_costs(user: User) -> Ints:
    """The price term of each flight [F]."""
    prices = np.array([flight.price for flight in user.flights], dtype=np.int64)
    return _truncated(-user.price_pref * (prices - user.mean_price), user.mean_price)


def arrival_costs(users: tuple[User, User], arrival_pref: int) -> Ints:
    """The arrival term of each pair of flights, for one user: [F0, F1]."""
    first, second = (np.array([f.end for f in user.flights], dtype=np.int64) for user in users)
    hours = np.abs(first[:, None] - second[None, :]) // 60
    return _truncated(-arrival_pref * hours, 3)


def pair_scores(users: tuple[User, User], arrival_pref: int) -> Ints:
    """The score of each pair of flights [F0, F1]."""
    own = [calendar_costs(user) + price_costs(user) for user in users]
    return own[0][:, None] + own[1][None, :] + 2 * arrival_costs(users, arrival_pref)


def pair_costs(instance: MediationInstance, pair: Pair) -> tuple[Costs, Costs]:
    """Both users' terms of one pair of flights."""
    arrival = int(arrival_costs(instance.users, instance.arrival_pref)[pair])
    first, second = (
        Costs(int(calendar_costs(user)[flight]), int(price_costs(user)[flight]), arrival)
        for user, flight in zip(instance.users, pair, strict=True)
    )
    return first, second


def points_of(instance: MediationInstance, pair: Pair) -> int:
    """The score of one pair of flights."""
    return sum(costs.total for costs in pair_costs(instance, pair))


def middle(highest: int) -> float:
    """The mean of a weight that is uniform from 1 to `highest`; 0 if `highest` is 0."""
    return (1 + highest) / 2 if highest else 0.0


def best_of(points: Floats) -> Pair:
    """The pair with the most points [F0, F1]."""
    row, column = np.unravel_index(int(points.argmax()), points.shape)
    return int(row), int(column)


def pair_points(
    points: tuple[Floats, Floats], arrivals: Sequence[Sequence[int]], *, arrival_weight: float
) -> Floats:
    """The believed score of each pair [F0, F1]; `points[user]` has that user's own terms [F]."""
    first, second = (np.array(times, dtype=np.float64) for times in arrivals)
    hours = np.abs(first[:, None] - second[None, :]) // 60
    return points[0][:, None] + points[1][None, :] - 2 * arrival_weight * hours / 3


def referenced(instance: MediationInstance) -> MediationInstance:
    """The instance with `best`, `worst` and `alone` computed from its users."""
    users = instance.users
    scores = pair_scores(users, instance.arrival_pref)
    # The agent's beliefs without messages: it knows the times of shared events, and estimates a
    # user's mean price from the listed prices.
    points = []
    for user in users:
        price_F = np.array([flight.price for flight in user.flights], dtype=np.float64)
        mean = float(np.mean(price_F)) / MEAN_OF_PRICES
        believed_F = -middle(instance.max_price_pref) * (price_F - mean) / max(mean, 1.0)
        points.append(-MEAN_IMPORTANCE * shared_conflicts(user) + believed_F)
    arrivals = [[flight.end for flight in user.flights] for user in users]
    weight = middle(instance.max_arrival_pref)
    alone = best_of(pair_points((points[0], points[1]), arrivals, arrival_weight=weight))
    best, worst = int(scores.max()), int(scores.min())
    return replace(instance, best=best, worst=worst, alone=int(scores[alone]))


def _truncated(numerator: Ints, denominator: int) -> Ints:
    """The quotients, rounded towards 0. This is exact: doubles represent these integers exactly,
    and a rounded quotient of two of them is an integer only if the true quotient is."""
    return np.trunc(numerator / denominator).astype(np.int64)
