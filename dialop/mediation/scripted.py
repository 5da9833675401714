"""Scripted players of mediation, for imitation, evaluation and tests. They use only a view.

A player plays any seat: a user states costs and answers proposals, the agent listens and searches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from dialop.game import Lesson
from dialop.kit import option
from dialop.mediation import wording
from dialop.mediation.belief import believed_best, believed_points, stated_by
from dialop.mediation.records import AGENT, USERS, AgentView, UserView
from dialop.mediation.score import MEAN_OF_PRICES
from dialop.specs import ScriptedBase, made

_NUM_TOP = 3
_MAX_REJECTIONS = 2
_NEVER = 1000.0  # points
# In private text: the points of a step, which are half of what an hour between the arrivals costs
# on average; the most steps of a loss; the points that a price of twice the usual one costs, more
# than the mean weight of 5.5, because the mean of 1 / m is larger than 1 / the mean of m (on 600
# games 0.989, with 5.5 points 0.986).
_STEP, _MOST, _DEAR = 11 / 6, 12, 8.0


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted player: random (any pair, accepts anything), solo (the agent books from what it
    sees, users state nothing) or honest. `OPTIONS` lists the options of each kind.

    - `tell`: what an honest user states first: the calendar cost of all flights ("costs") or of its
      best few ("top"), or all events with their importance ("calendar"; only in the full style).
    - `probe`: the number of proposals that an honest user rejects only to state their terms.
    - `strict`: a user also rejects, at most twice, a flight whose points are at least this much
      below its best calendar cost.
    - `think`: what is written in private: nothing ("no"), or ("values") by the agent before a
      proposal the value of each flight and the best pair so far (`_by_values`), and in the full
      style by a user, before it states its costs, the events that each flight overlaps.
    - `stray`: with `think` "values", the probability that it proposes a random pair in place of the
      best one.
    - `slip`: the probability that it first sends a malformed move and then repairs it.
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
        """The agent: asks each user that has stated nothing once, then proposes the best pair."""
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
        """A user: answers a pending proposal, otherwise states what it has not stated yet."""
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
    each flight of both users, in order of its hour of arrival. The line begins as in the agent's
    list, with id, price and hour. Then come the hour of the user's next flight; the believed
    calendar cost, the loss by price in tens, the hours since the line before, and the loss by both
    terms; the best flight so far of user 0 and of user 1, each with its loss, which grows with
    every hour; and the best pair so far with its loss. So each number is copied, or follows from
    two numbers before it.

    A loss is in steps of `_STEP` points, at most `_MOST`. Of equal choices the first one is taken.
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
    for user, (calendar, _) in enumerate(believed_points(view, stated_by(view, listen=listen))):
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
