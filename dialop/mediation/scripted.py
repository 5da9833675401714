"""Scripted players of mediation, for imitation, evaluation and tests. They use only a view.

A player plays any seat: a user states costs and answers proposals, the agent listens and searches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dialop.game import Lesson
from dialop.kit import option
from dialop.mediation import wording
from dialop.mediation.belief import believed_best, believed_points, stated_by
from dialop.mediation.records import AGENT, USERS, AgentView, UserView
from dialop.mediation.score import middle
from dialop.specs import ScriptedBase, made

_NUM_TOP = 3
_MAX_REJECTIONS = 2
_NEVER = 1000.0  # points
_STEP, _MOST = 3, 9  # points a step and the most steps of a loss in private text


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted player: random (any pair, accepts anything), solo (the agent books from what it
    sees, users state nothing) or honest. `OPTIONS` lists the options of each kind.

    - `tell`: what an honest user states first: the calendar cost of all flights ("costs") or of its
      best few ("top"), or all events with their importance ("calendar"; only in the full style).
    - `probe`: the number of proposals that an honest user rejects only to state their terms.
    - `strict`: a user also rejects, at most twice, a flight whose points are at least this much
      below its best calendar cost.
    - `think`: what the agent writes in private before a proposal: nothing ("no"), or the value of
      each flight and of each flight of user 0 with the best one of user 1 ("values", `_by_values`).
    - `slip`: the probability that it first sends a malformed move and then repairs it.
    """

    OPTIONS: ClassVar = {
        "random": ("slip",),
        "solo": ("strict", "think", "slip"),
        "honest": ("tell", "probe", "strict", "think", "slip"),
    }

    tell: Literal["costs", "top", "calendar"] = option("costs")
    probe: int = option(0, low=0, high=9)
    strict: float = option(_NEVER, low=0, high=_NEVER)
    think: Literal["no", "values"] = option("no")
    slip: float = option(0.0, low=0, high=1)

    def lesson(self, view: UserView | AgentView) -> Lesson:
        """The next move as an example to imitate."""
        self.check_turn(view)
        rng = np.random.default_rng((self.seed, view.seat, len(view.log)))
        text = self._book(view, rng) if isinstance(view, AgentView) else self._travel(view, rng)
        if self.slip and not view.num_errors_this_turn and rng.random() < self.slip:
            move_at = text.find("all:")  # private text is never malformed
            text = wording.malformed(text[max(0, move_at) :], rng)
        return Lesson(text)

    def _book(self, view: AgentView, rng: np.random.Generator) -> str:
        """The agent: asks each user that has stated nothing once, then proposes the best pair."""
        if self.name == "random":
            first, second = (int(rng.integers(len(flights))) for flights in view.conflicts)
            return wording.proposal((first, second))
        listens = self.name == "honest" and view.options.messages
        if listens:
            asked = {act.room for act in view.log if act.kind == "message" and act.seat == AGENT}
            stated = stated_by(view, listen=True)
            for user in USERS:
                if not stated[user].anything and user not in asked:
                    return wording.question(user, rng, brief=view.options.brief)
        if self.think == "values":
            return _by_values(view, listen=listens)
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
        return wording.costs_message(costs, rng, brief=brief)

    def _rejects(self, view: UserView) -> bool:
        num_rejected = sum(act.kind == "reject" for act in view.log)
        if self.name == "honest" and view.options.messages and num_rejected < self.probe:
            return True
        costs = next(act.costs for act in reversed(view.log) if act.costs is not None)
        regret = max(view.calendar_costs) - costs.total
        return regret >= self.strict and num_rejected < _MAX_REJECTIONS


def _by_values(view: AgentView, *, listen: bool) -> str:
    """Value each flight, then each flight of user 0 with the best one of user 1, in private text;
    propose the best of these pairs.

    Values are losses in steps of `_STEP` points, at most `_MOST`. A flight's line has its believed
    calendar cost in points, the loss by its price, the hour of its arrival, and its loss by both
    terms; a pair's line both flights and their loss with the gap between the hours. Of equal
    choices the first one is taken.
    """
    stated, lines, losses, hours = stated_by(view, listen=listen), [], [], []
    for user, (calendar, price) in enumerate(believed_points(view, stated)):
        lines.append(f"Flights {user}")
        costs, by_price = np.rint(calendar).astype(int), _steps(price)
        losses.append(np.minimum(_steps(costs) + by_price, _MOST))
        hours.append(np.array(view.arrivals[user]) // 60)
        columns = zip(costs, by_price, hours[user], losses[user], strict=True)
        lines += [f"id {i} {c} {p} {h}: {loss}" for i, (c, p, h, loss) in enumerate(columns)]
    gaps = np.abs(hours[0][:, None] - hours[1][None])
    weight = 2 * middle(view.max_arrival_pref) / 3
    loss = losses[0][:, None] + losses[1][None] + _steps(-weight * gaps)
    best = loss.argmin(axis=1)
    totals = np.minimum(loss.min(axis=1), _MOST)
    pairs = zip(best, totals, strict=True)
    lines += [f"id {a}, user 1: id {b} {total}" for a, (b, total) in enumerate(pairs)]
    pair = int(totals.argmin()), int(best[totals.argmin()])
    return "\n".join([*lines, wording.proposal(pair)])


def _steps(points: NDArray[Any]) -> NDArray[np.int64]:
    """Points as losses in whole steps, at most `_MOST`."""
    return np.minimum(np.rint(-points / _STEP), _MOST).astype(np.int64)


make_scripted = partial(made, ScriptedPlayer)
