"""The rules of city planning, the "Planning" game of DialOp.

The user (seat 0) has preferences. The agent (seat 1) can search the city's database and propose
plans. Both get the same reward: the place of the agreed plan's total between the worst (0) and the
best (1). A game that stops early has no agreement. Source: Lin, Tomlin, Andreas, Eisner,
"Decision-Oriented Dialogue for Human-AI Collaboration", TACL 12 (2024).
docs/notes/planning.md lists the differences between these rules and the released code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

from dialop.game import Outcome, PlayerError, Prompt
from dialop.logged import LoggedGame, filled
from dialop.planning import texts
from dialop.planning.board import (
    AGENT,
    KINDS,
    USER,
    Action,
    Plan,
    PlanningInstance,
    PlanningOptions,
    PlanningView,
    Sheet,
)
from dialop.planning.preferences import Preference
from dialop.planning.proposal import parse_plan, render_plan
from dialop.planning.score import all_totals, sheet_of, tenths_between
from dialop.planning.scripted import (
    Scored,
    estimated_totals,
    scored_in,
    sheet_items,
    stated_preferences,
)
from dialop.planning.search import search
from dialop.planning.statements import count_true

_OWNER = {"tool": AGENT, "propose": AGENT, "accept": USER, "reject": USER}


class PlanningGame(LoggedGame):
    """One play of one planning instance.

    A message passes the turn. After a tool call the agent reads the result and moves again. The
    user must answer a full plan; a plan with an empty slot is a sketch that only passes the turn.
    A user who rejects moves again. Without messages the agent moves first, every plan must be full,
    and a rejection passes the turn.

    Error kinds: no_tag, unknown_tag, empty, not_yours, must_answer, nothing_pending, bad_query,
    bad_proposal, no_messages, no_search, not_your_turn, over.
    """

    name = "planning"
    num_seats = 2
    kinds = KINDS
    options_type = PlanningOptions
    instance_type, move_type = PlanningInstance, Action
    turn_error = "it is the other's turn"

    def __init__(self, instance: PlanningInstance, options: PlanningOptions) -> None:
        first = instance.first_seat if options.messages else AGENT
        super().__init__(instance, options, first=first, opening=instance.opening)

    def prompt(self, seat: int) -> Prompt:
        """The user's role and preferences, or the agent's role, tool and names of the sites; then
        the moves made so far."""
        inst, options = self.instance, self.options
        brief = options.brief
        if self._checked(seat) == USER:
            rules = texts.user_rules(slots=inst.slots, messages=options.messages)
            own = texts.user_opening(inst.preferences, brief=brief)
        else:
            rules = texts.agent_rules(
                inst.names, slots=inst.slots, messages=options.messages, search=options.search
            )
            own = texts.agent_opening(inst.names, brief=brief)
        log = [a for a in self.log[: self._num_opening] if _sees(seat, a)]
        past = texts.history(log, self._sheets(log), seat, inst, brief=brief)
        return self._prompt(seat, rules, own, past, says_turn=True)

    def view(self, seat: int) -> PlanningView:
        """The seat's knowledge as data."""
        inst = self.instance
        is_user = seat == USER
        log = tuple(action for action in self.log if _sees(seat, action))
        return PlanningView(
            **self._known(seat),
            names=() if is_user else inst.names,
            slots=inst.slots,
            preferences=tuple(p.text for p in inst.preferences) if is_user else (),
            sheets=self._sheets(log) if is_user else (),
            log=log,
            pending=self.pending,
        )

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """Words in messages, searches, proposals, and all and true statements in messages."""
        names = ("words", "searches", "proposals", "statements", "true_statements")
        num = dict.fromkeys(names, 0.0)
        sheet: Sheet | None = None
        proposed: tuple[str, ...] = ()
        for number, action in enumerate(self.log):
            if action.plan is not None:
                sheet = sheet_of(self.instance.sites, self.instance.preferences, action.plan)
                proposed = tuple(action.text.strip("[]").split(", "))
            if number < len(self.instance.opening) or action.seat not in seats:
                continue
            num["searches"] += action.kind == "tool"
            num["proposals"] += action.kind == "propose"
            if action.kind == "message":
                true, stated = count_true(action, self.instance, sheet, proposed)
                num["words"] += len(action.text.split())
                num["statements"] += stated
                num["true_statements"] += true
        return num

    def reach(self) -> list[tuple[float, ...]]:
        """As in `Game.reach`, given the preferences and scores that the user stated: the agent can
        look up all facts of the city. Plans that look equally good count by their mean."""
        inst = self.instance
        miles_SS = tenths_between(inst.sites)
        totals = all_totals(inst.sites, inst.preferences, slots=inst.slots)

        @cache
        def best(stated: tuple[Preference, ...], scored: tuple[Scored, ...]) -> float:
            estimated = estimated_totals(stated, scored, inst.sites, miles_SS, slots=inst.slots)
            return inst.norm(float(totals[estimated == estimated.max()].mean()))

        def known(number: int) -> tuple[float, ...]:
            log = self.log[:number]
            own = [p.text for p in inst.preferences]
            stated = tuple(p for p in stated_preferences(log) if p.text in own)
            return (best(stated, tuple(map(self._true_part, scored_in(log)))),) * 2

        return [known(number) for number in self._times]

    def _true_part(self, scored: Scored) -> Scored:
        """The true part of the scores that were stated about a plan."""
        sheet = sheet_of(self.instance.sites, self.instance.preferences, scored.plan)
        names = ["" if i is None else self.instance.names[i] for i in scored.plan]
        own = sheet_items(sheet, names)
        return replace(scored, labels=tuple(item for item in scored.labels if item in own))

    def outcome(self) -> Outcome:
        """The outcome, with the total in points as score. Both seats get its place between worst
        and best as reward, 0 without an agreement.

        `facts` holds `best`, `worst` and `random`, the normalized total of the average plan.
        """
        inst, log = self.instance, self.log
        proposed = [a.plan for a in log if a.plan is not None and None not in a.plan]
        facts = {"best": float(inst.best), "worst": float(inst.worst)}
        return self._outcome(self.total, proposed, {**facts, "random": inst.norm(inst.mean)})

    def _sheets(self, log: Any) -> tuple[Sheet, ...]:
        """The score sheet of each proposal in the moves."""
        sites, preferences = self.instance.sites, self.instance.preferences
        plans = [action.plan for action in log if action.plan is not None]
        return tuple(sheet_of(sites, preferences, plan) for plan in plans)

    def total(self, plan: Plan) -> int:
        """The points of a plan."""
        return sheet_of(self.instance.sites, self.instance.preferences, plan).total

    def _read(self, seat: int, text: str) -> Action:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""
        self._check_turn(seat)
        options, valid = self.options, self._valid_tags(seat)
        tag, content = self._split(text, valid)
        self._check_tag(tag, valid)
        if _OWNER.get(tag, seat) != seat:
            raise PlayerError("not_yours", f"only the other can [{tag}]; use {valid}")
        if self._answers(tag, valid, what="plan", none="full plan"):
            return Action(seat, tag, "")
        self._check_messages(tag, valid)
        if tag == "tool" and not options.search:
            raise PlayerError("no_search", f"the search tool is off; use {valid}")
        if filled(content, tag) and tag == "tool":
            result = search(content, self.instance.sites)
            return Action(seat, "tool", content, result=result)
        if tag == "message":
            return Action(seat, "message", content)
        names = self.instance.names
        plan = parse_plan(content, names, slots=self.instance.slots)
        if None in plan and not options.messages:
            raise PlayerError("bad_proposal", "without messages every slot needs a site")
        return Action(seat, "propose", render_plan(plan, names), plan)

    def _valid_tags(self, seat: int) -> str:
        if self.pending is not None:
            return "[accept] or [reject]"
        options, is_agent = self.options, seat == AGENT
        tags = {"message": options.messages, "tool": is_agent and options.search}
        tags["propose"] = is_agent
        return " or ".join(f"[{tag}]" for tag, allowed in tags.items() if allowed)

    def _apply(self, move: Action) -> tuple[str, str]:
        brief = self.options.brief
        for_mover, for_other = move.result, ""
        match move.kind:
            case "message":
                self.to_move = 1 - move.seat
            case "propose":
                self.pending = move.plan if None not in (move.plan or ()) else None
                self.to_move = USER
            case "accept":
                self.agreed, self.pending = self.pending, None
                self.to_move = None
            case "reject":
                self.pending = None
                self.to_move = USER if self.options.messages else AGENT
                if self.options.messages:
                    for_mover = texts.reject_text(brief=brief)
        if move.kind != "tool":
            sheet = self._sheets([move])[0] if move.plan is not None else None
            for_other = texts.read_by(1 - move.seat, move, self.instance, sheet, brief=brief)
        return (for_mover, for_other) if move.seat == USER else (for_other, for_mover)


def _sees(seat: int, action: Action) -> bool:
    """Whether a seat knows about a move: tool calls are private."""
    return action.kind != "tool" or action.seat == seat
