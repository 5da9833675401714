"""Scripted players of mediation, for imitation, evaluation and tests. They use only a view.

A player plays any seat: a user states costs and answers proposals, the agent listens and searches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from dialop.game import Lesson
from dialop.kit import option
from dialop.mediation import wording
from dialop.mediation.belief import believed_best, stated_by
from dialop.mediation.records import AGENT, USERS, AgentView, UserView
from dialop.specs import ScriptedBase, made

_NUM_TOP = 3
_MAX_REJECTIONS = 2
_NEVER = 1000.0  # points


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(ScriptedBase):
    """One scripted player: random (any pair, accepts anything), solo (the agent books from what it
    sees, users state nothing) or honest. `OPTIONS` lists the options of each kind.

    - `tell`: what an honest user states first: the calendar cost of all flights ("costs") or of its
      best few ("top"), or all events with their importance ("calendar"; only in the full style).
    - `probe`: the number of proposals that an honest user rejects only to state their terms.
    - `strict`: a user also rejects, at most twice, a flight whose points are at least this much
      below its best calendar cost.
    - `slip`: the probability that it first sends a malformed move and then repairs it.
    """

    OPTIONS: ClassVar = {
        "random": ("slip",),
        "solo": ("strict", "slip"),
        "honest": ("tell", "probe", "strict", "slip"),
    }

    tell: Literal["costs", "top", "calendar"] = option("costs")
    probe: int = option(0, low=0, high=9)
    strict: float = option(_NEVER, low=0, high=_NEVER)
    slip: float = option(0.0, low=0, high=1)

    def lesson(self, view: UserView | AgentView) -> Lesson:
        """The next move as an example to imitate."""
        self.check_turn(view)
        rng = np.random.default_rng((self.seed, view.seat, len(view.log)))
        text = self._book(view, rng) if isinstance(view, AgentView) else self._travel(view, rng)
        if self.slip and not view.num_errors_this_turn and rng.random() < self.slip:
            text = wording.malformed(text, rng)
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


make_scripted = partial(made, ScriptedPlayer)
