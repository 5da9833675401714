"""The agent's search: the best pair of flights under its estimates for both users.

An estimate is a number of points for each flight of a user, and a weight of the arrival gap.
Unknown importances and weights are set to the mean of their ranges. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dialop.mediation.records import MAX_IMPORTANCE, MediationInstance, Pair
from dialop.mediation.score import pair_scores, shared_conflicts

Floats = NDArray[np.float64]

MEAN_IMPORTANCE = (1 + MAX_IMPORTANCE) / 2
# Prices are max(50, normal(m, m)), whose mean is close to m (P(Z < 1) + p(1)) = 1.083 m.
_MEAN_OF_PRICES = 1.083


def middle(highest: int) -> float:
    """The mean of a weight that is uniform from 1 to `highest`; 0 if `highest` is 0."""
    return (1 + highest) / 2 if highest else 0.0


def price_points(prices: Sequence[int], *, weight: float) -> Floats:
    """The believed price term of each flight [F]; the prices tell the user's mean price."""
    mean = float(np.mean(prices)) / _MEAN_OF_PRICES
    return -weight * (np.array(prices, dtype=np.float64) - mean) / max(mean, 1.0)


def best_pair(
    points: tuple[Floats, Floats], arrivals: Sequence[Sequence[int]], *, arrival_weight: float
) -> Pair:
    """The pair with the highest believed score; `points[user]` has that user's own terms [F]."""
    first, second = (np.array(times, dtype=np.float64) for times in arrivals)
    hours = np.abs(first[:, None] - second[None, :]) // 60
    total = points[0][:, None] + points[1][None, :] - 2 * arrival_weight * hours / 3
    row, column = np.unravel_index(int(total.argmax()), total.shape)
    return int(row), int(column)


def alone_pair(
    conflicts: Sequence[Sequence[int]],
    prices: Sequence[Sequence[int]],
    arrivals: Sequence[Sequence[int]],
    *,
    max_price_pref: int,
    max_arrival_pref: int,
) -> Pair:
    """The pair that the agent books without messages; of the events it knows only shared times."""
    first, second = (
        -MEAN_IMPORTANCE * np.array(conflicts[user], dtype=np.float64)
        + price_points(prices[user], weight=middle(max_price_pref))
        for user in (0, 1)
    )
    return best_pair((first, second), arrivals, arrival_weight=middle(max_arrival_pref))


def referenced(instance: MediationInstance) -> MediationInstance:
    """The instance with `best`, `worst` and `alone` computed from its users."""
    scores = pair_scores(instance.users, instance.arrival_pref)
    pair = alone_pair(
        [shared_conflicts(user).tolist() for user in instance.users],
        [[flight.price for flight in user.flights] for user in instance.users],
        [[flight.end for flight in user.flights] for user in instance.users],
        max_price_pref=instance.max_price_pref,
        max_arrival_pref=instance.max_arrival_pref,
    )
    best, worst = int(scores.max()), int(scores.min())
    return replace(instance, best=best, worst=worst, alone=int(scores[pair]))
