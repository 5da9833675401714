"""The scripted agent's estimates of both users' costs, from what it sees and what they state.

Calendar: a stated cost is used as it is; stated events give the cost of every flight; otherwise the
shared events cost the mean importance each. Prices and the arrival weight: the posterior mean over
weights and mean prices, given the listed prices and the stated terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dialop.mediation.records import AGENT, USERS, AgentView, Costs, Pair
from dialop.mediation.score import MEAN_IMPORTANCE, Floats, best_of, middle, pair_points
from dialop.mediation.statements import Span, cost_of_events, read_statements

# Points that a rejection takes from a flight if the user has not stated its terms.
_REJECTED = 15.0
_LEAST_PRICE = 50
_TIE = 1e-6  # points; random noise that breaks ties, smaller than any real difference
_MEANS = np.arange(50, 1000, 10, dtype=np.float64)


@dataclass(slots=True)
class Stated:
    """What one user has said and answered so far."""

    costs: dict[int, int] = field(default_factory=dict)
    events: list[Span] = field(default_factory=list)
    terms: list[tuple[Pair, Costs]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    @property
    def anything(self) -> bool:
        return bool(self.costs or self.events or self.terms)


def stated_by(view: AgentView, *, listen: bool) -> tuple[Stated, Stated]:
    """The users' statements (empty unless `listen`) and the flights that they rejected."""
    stated, last = (Stated(), Stated()), None
    for act in view.log:
        if act.kind == "propose":
            last = act.flights
        elif act.seat == AGENT:
            continue
        elif act.kind == "reject" and last is not None:
            stated[act.seat].rejected.append(last[act.seat])
        elif act.kind == "message" and listen:
            read = read_statements(act.text, view.options.brief)
            stated[act.seat].costs.update(read.costs)
            stated[act.seat].events.extend(read.events)
            if read.terms is not None and last is not None:
                stated[act.seat].terms.append((last, read.terms))
    return stated


def believed_best(view: AgentView, rng: np.random.Generator, *, listen: bool = True) -> Pair:
    """The pair with the highest believed score, one of them at random if several have it."""
    points = believed_pairs(view, stated_by(view, listen=listen))
    first, second = (rng.uniform(0, _TIE, size=(size,)) for size in points.shape)
    return best_of(points + first[:, None] + second[None, :])


def believed_pairs(view: AgentView, stated: tuple[Stated, Stated]) -> Floats:
    """The believed score of each pair of flights [F0, F1]."""
    first, second = (calendar + price for calendar, price in believed_points(view, stated))
    gaps = [
        (abs(view.arrivals[0][pair[0]] - view.arrivals[1][pair[1]]) // 60, terms.arrival)
        for user in USERS
        for pair, terms in stated[user].terms
    ]
    weight = arrival_weight(gaps, max_weight=view.max_arrival_pref)
    return pair_points((first, second), view.arrivals, arrival_weight=weight)


def believed_points(
    view: AgentView, stated: tuple[Stated, Stated]
) -> tuple[tuple[Floats, Floats], ...]:
    """For each user the believed calendar cost and price term of each flight [F]."""
    return tuple(
        (
            _calendar(view, user, stated[user]),
            price_points(
                view.prices[user],
                [(view.prices[user][pair[user]], term.price) for pair, term in stated[user].terms],
                max_weight=view.max_price_pref,
            ),
        )
        for user in USERS
    )


def _calendar(view: AgentView, user: int, stated: Stated) -> Floats:
    """The believed calendar cost of each flight [F], minus points for unexplained rejections."""
    points = -MEAN_IMPORTANCE * np.array(view.conflicts[user], dtype=np.float64)
    if stated.events and view.flights:
        spans = [(flight.start, flight.end) for flight in view.flights[user]]
        points = np.array([cost_of_events(stated.events, span) for span in spans], dtype=np.float64)
    elif stated.costs:
        # A user that states the costs of only some flights states its best ones.
        points = np.minimum(points, min(stated.costs.values()) - 1.0)
    for flight, cost in stated.costs.items():
        if flight < len(points):
            points[flight] = cost
    if not stated.terms:
        for flight in stated.rejected:
            points[flight] -= _REJECTED
    return points


def price_points(
    prices: Sequence[int], stated: Sequence[tuple[int, int]], *, max_weight: int
) -> Floats:
    """The posterior mean of each flight's price term [F].

    `stated` holds (price, term) of proposals. The prior is the game's: weights uniform from 1 to
    `max_weight`, mean prices m uniform from 50 to 999, prices max(50, normal(m, m)).
    """
    from scipy.special import log_ndtr

    price_F = np.array(prices, dtype=np.float64)
    if not max_weight:
        return np.zeros_like(price_F)
    mean_M1 = _MEANS[:, None]
    z = (price_F - mean_M1) / mean_M1
    log_M = np.where(price_F > _LEAST_PRICE, -0.5 * z * z - np.log(mean_M1), log_ndtr(z)).sum(
        axis=1
    )
    weight_W = np.arange(1, max_weight + 1, dtype=np.float64)
    log_MW = np.repeat(log_M[:, None], max_weight, axis=1)
    for price, term in stated:
        exact = -weight_W * (price - mean_M1) / mean_M1
        # Errors of one point are common: terms are rounded towards 0 and the grid is coarse.
        log_MW = log_MW - 0.5 * (exact - term) ** 2
    share_MW = np.exp(log_MW - log_MW.max())
    share_MW /= share_MW.sum()
    # The mean of -w (p - m) / m over all weights and means.
    return -np.einsum("mw,w,mf->f", share_MW, weight_W, z)


def arrival_weight(stated: Sequence[tuple[int, int]], *, max_weight: int) -> float:
    """The posterior mean of the arrival weight from (whole hours of gap, term) of proposals."""
    if not max_weight:
        return 0.0
    fitting = [
        weight
        for weight in range(1, max_weight + 1)
        if all(-(weight * hours // 3) == term for hours, term in stated)
    ]
    return sum(fitting) / len(fitting) if fitting else middle(max_weight)
