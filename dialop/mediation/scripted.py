"""Scripted players of mediation, for imitation, evaluation and tests. They use only a view.

A player plays any seat: a user states costs and answers proposals, the agent listens and searches.
The first part has the agent's estimates of both users' costs. Calendar: a stated cost is used
unchanged; stated events give the cost of every flight; otherwise the shared events cost the mean
importance each. Prices and the arrival weight: the posterior mean over weights and mean prices,
given the listed prices and the stated terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from dialop.game import Lesson
from dialop.kit import option
from dialop.mediation import wording
from dialop.mediation.records import AGENT, USERS, AgentView, Costs, Pair, UserView
from dialop.mediation.score import (
    MEAN_IMPORTANCE,
    MEAN_OF_PRICES,
    Floats,
    best_of,
    middle,
    pair_points,
)
from dialop.mediation.statements import Span, cost_of_events, read_statements
from dialop.specs import ScriptedBase, made

# Points that a rejected flight loses if the user has not stated its terms.
_REJECTED = 15.0
_LEAST_PRICE = 50
_TIE = 1e-6  # points; random noise that breaks ties, smaller than any real difference
_MEANS = np.arange(50, 1000, 10, dtype=np.float64)


@dataclass(slots=True)
class Stated:
    """One user's statements and answers so far."""

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
    """The pair with the highest believed score; ties are broken at random."""
    points = believed_pairs(view, stated_by(view, listen=listen))
    first, second = (rng.uniform(0, _TIE, size=(size,)) for size in points.shape)
    return best_of(points + first[:, None] + second[None, :])


def believed_pairs(view: AgentView, stated: tuple[Stated, Stated]) -> Floats:
    """The believed score of each pair of flights [F0, F1]."""
    first, second = (
        _calendar(view, user, stated[user])
        + price_points(
            view.prices[user],
            [(view.prices[user][pair[user]], term.price) for pair, term in stated[user].terms],
            max_weight=view.max_price_pref,
        )
        for user in USERS
    )
    gaps = [
        (abs(view.arrivals[0][pair[0]] - view.arrivals[1][pair[1]]) // 60, terms.arrival)
        for user in USERS
        for pair, terms in stated[user].terms
    ]
    weight = arrival_weight(gaps, max_weight=view.max_arrival_pref)
    return pair_points((first, second), view.arrivals, arrival_weight=weight)


def _calendar(view: AgentView, user: int, stated: Stated) -> Floats:
    """The believed calendar cost of each flight [F], minus points for unexplained rejections."""
    points = -MEAN_IMPORTANCE * np.array(view.conflicts[user], dtype=np.float64)
    if stated.events and view.flights:
        spans = [(flight.start, flight.end) for flight in view.flights[user]]
        points = np.array([cost_of_events(stated.events, span) for span in spans], dtype=np.float64)
    elif stated.costs:
        # A user that states only some costs states its best flights.
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
    """The posterior mean of the arrival weight, given (whole hours of gap, term) of proposals."""
    if not max_weight:
        return 0.0
    fitting = [
        weight
        for weight in range(1, max_weight + 1)
        if all(-(weight * hours // 3) == term for hours, term in stated)
    ]
    return sum(fitting) / len(fitting) if fitting else middle(max_weight)


_NUM_TOP = 3
_MAX_REJECTIONS = 2
_NEVER = 1000.0  # points
# In private text: the points of a step, half of the mean cost of an hour between the arrivals; the
# most steps of a loss; the cost in points of twice the usual price, more than the mean weight of
# 5.5, because the mean of 1 / m is larger than 1 / the mean of m (score 0.989 on 600 games, 0.986
# with 5.5 points).
_STEP, _MOST, _DEAR = 11 / 6, 12, 8.0


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted player: random (any pair, accepts anything), solo (the agent books by what it
    sees, users state nothing) or honest. `OPTIONS` lists the options of each kind.

    - `tell`: the first statement of an honest user: the calendar cost of all flights ("costs") or
      of its best few ("top"), or all events with their importance ("calendar"; full style only).
    - `probe`: the number of proposals that an honest user rejects only to state their terms.
    - `strict`: a user also rejects, at most twice, a flight whose points are at least this much
      below its best calendar cost.
    - `think`: the private text: none ("no"), or "values": before a proposal the agent writes the
      value of each flight and the best pair so far (`_by_values`), and in the full style a user
      writes the events that each flight overlaps before it states its costs.
    - `stray`: with `think` "values", the probability of a proposal of a random pair instead of the
      best one.
    - `slip`: the probability of an injected error: a malformed move first, which it then repairs.
    """

    OPTIONS: ClassVar = {
        "random": ("slip",),
        "solo": ("strict", "think", "stray", "slip"),
        "honest": ("tell", "probe", "strict", "think", "stray", "slip"),
    }

    tell: Literal["costs", "top", "calendar"] = option("costs")
    probe: int = option(0, low=0, high=9)
    strict: float = option(_NEVER, low=0, high=_NEVER)
    think: Literal["no", "values"] = option("no")
    stray: float = option(0.0, low=0, high=1)
    slip: float = option(0.0, low=0, high=1)

    def __post_init__(self) -> None:
        if self.stray and self.think != "values":
            raise ValueError(f"stray={self.stray:g} needs think=values")

    def lesson(self, view: UserView | AgentView) -> Lesson:
        """The next move as an example to imitate."""
        self.check_turn(view)
        rng = np.random.default_rng((self.seed, view.seat, len(view.log)))
        text = self._book(view, rng) if isinstance(view, AgentView) else self._travel(view, rng)
        if self.slip and not view.num_errors_this_turn and rng.random() < self.slip:
            start = "all:" if view.seat == AGENT else "[message]"
            move_at = text.find(start)  # private text is never malformed
            text = wording.malformed(text[max(0, move_at) :], rng)
        return Lesson(text)

    def _book(self, view: AgentView, rng: np.random.Generator) -> str:
        """The agent asks each user that has stated nothing once, then proposes the best pair."""
        if self.name == "random":
            return wording.proposal(_random_pair(view, rng))
        listens = self.name == "honest" and view.options.messages
        if listens:
            asked = {act.room for act in view.log if act.kind == "message" and act.seat == AGENT}
            stated = stated_by(view, listen=True)
            for user in USERS:
                if not stated[user].anything and user not in asked:
                    return wording.question(user, rng, brief=view.options.brief)
        if self.think == "values":
            lines, pair = _by_values(view, listen=listens)
            if self.stray and rng.random() < self.stray:
                pair = _random_pair(view, rng)
            return "\n".join([*lines, wording.proposal(pair)])
        return wording.proposal(believed_best(view, rng, listen=listens))

    def _travel(self, view: UserView, rng: np.random.Generator) -> str:
        """A user answers a pending proposal, otherwise states what it has not stated yet."""
        if view.answer_due:
            return "[reject]" if self._rejects(view) else "[accept]"
        brief = view.options.brief
        if self.name != "honest":
            return wording.greeting(rng, brief=brief)
        proposed = [act.costs for act in view.log if act.costs is not None]
        has_spoken = any(act.kind == "message" and act.seat == view.seat for act in view.log)
        if has_spoken and proposed and proposed[-1] is not None:
            return wording.terms_message(proposed[-1], rng, brief=brief)
        if self.tell == "calendar" and not brief:
            return wording.events_message(view.events, rng)
        costs = dict(enumerate(view.calendar_costs))
        if self.tell == "top":
            best = sorted(costs, key=lambda flight: -costs[flight])[:_NUM_TOP]
            costs = {flight: cost for flight, cost in costs.items() if flight in best}
        message = wording.costs_message(costs, rng, brief=brief)
        if self.think == "values" and not brief:
            return "\n".join([*wording.overlap_lines(view.flights, view.events), message])
        return message

    def _rejects(self, view: UserView) -> bool:
        num_rejected = sum(act.kind == "reject" for act in view.log)
        if self.name == "honest" and view.options.messages and num_rejected < self.probe:
            return True
        costs = next(act.costs for act in reversed(view.log) if act.costs is not None)
        regret = max(view.calendar_costs) - costs.total
        return regret >= self.strict and num_rejected < _MAX_REJECTIONS


def _random_pair(view: AgentView, rng: np.random.Generator) -> tuple[int, int]:
    first, second = (int(rng.integers(len(flights))) for flights in view.conflicts)
    return first, second


def _by_values(view: AgentView, *, listen: bool) -> tuple[list[str], tuple[int, int]]:
    """The lines of private text that value all flights, and the best pair.

    The text starts with the usual price of each user, in tens of dollars. Then it has a line for
    each flight of both users, ordered by hour of arrival. The line starts with id, price and hour,
    as in the agent's list. Then come the hour of the user's next flight; the believed calendar
    cost, the loss by price in tens, the hours since the previous line, and the loss by both terms;
    the best flight so far of user 0 and of user 1, each with its loss, which grows every hour; and
    the best pair so far with its loss. So each number is copied, or follows from two earlier
    numbers.

    A loss is in steps of `_STEP` points, at most `_MOST`. Ties go to the first choice.
    """
    brief = view.options.brief
    lines = [wording.usual(user, _usual(view.prices[user]), brief=brief) for user in USERS]
    rows = sorted(_rows(view, listen=listen))
    slower = 2 if view.max_arrival_pref else 0
    best: list[tuple[int, int] | None] = [None, None]
    pair, total, before = (0, 0), _MOST + 1, rows[0].hour
    for row in rows:
        gap = min(row.hour - before, _MOST // 2)
        loss = min(round(-row.cost / _STEP) + row.by_price, _MOST)
        best = [b and (b[0], min(b[1] + slower * gap, _MOST)) for b in best]
        own, other = best[row.user], best[1 - row.user]
        if other is not None and min(loss + other[1], _MOST) < total:
            pair = (other[0], row.flight) if row.user else (row.flight, other[0])
            total = min(loss + other[1], _MOST)
        if own is None or loss < own[1]:
            best[row.user] = row.flight, loss
        so_far = " ".join("-" if b is None else f"id {b[0]} {b[1]}" for b in best)
        found = f"id {pair[0]} id {pair[1]} {total}" if total <= _MOST else "-"
        lines += wording.valued(row, (gap, loss), so_far, found, brief=brief)
        before = row.hour
    return lines, pair


def _rows(view: AgentView, *, listen: bool) -> Iterator[wording.Row]:
    for user, stated in enumerate(stated_by(view, listen=listen)):
        calendar = _calendar(view, user, stated)
        hours = [arrival // 60 for arrival in view.arrivals[user]]
        following = [*hours[1:], None]
        for i, price in enumerate(view.prices[user]):
            points = _DEAR * (price // 10 / _usual(view.prices[user]) - 1)
            yield wording.Row(
                hours[i],
                user,
                i,
                view.conflicts[user][i],
                price,
                following[i],
                round(calendar[i]),
                round(points / _STEP) if view.max_price_pref else 0,
            )


def _usual(prices: Sequence[int]) -> int:
    """The usual price of a user in tens of dollars."""
    return max(1, round(sum(prices) / len(prices) / MEAN_OF_PRICES / 10))


make_scripted = partial(made, ScriptedPlayer)
