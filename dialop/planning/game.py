"""The rules of city planning, the "Planning" game of DialOp.

The user (seat 0) has preferences. The agent (seat 1) can search the city's database and propose
plans. Both get the place of the agreed plan's total between the worst (0) and the best (1) plan.
Knows no tokens, retries or turn limits: a game that is stopped early has no agreement. Source: Lin,
Tomlin, Andreas, Eisner, "Decision-Oriented Dialogue for Human-AI Collaboration", TACL 12 (2024).
docs/planning.md lists where these rules differ from the released code.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from dialop.game import Game, Outcome, PlayerError, Prompt, Step
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
    action_from_dict,
    instance_from_dict,
)
from dialop.planning.proposal import parse_plan, render_plan
from dialop.planning.recorded import begun
from dialop.planning.score import sheet_of
from dialop.planning.search import search
from dialop.planning.statements import count_true
from dialop.tags import drop_reasoning, split_move

_OWNER = {"tool": AGENT, "propose": AGENT, "accept": USER, "reject": USER}


@dataclass(slots=True)
class _Play:
    """The state that changes during play."""

    log: list[Action] = field(default_factory=list)
    to_move: int | None = USER
    pending: Plan | None = None
    agreed: Plan | None = None
    num_errors: list[int] = field(default_factory=lambda: [0, 0])
    num_errors_this_turn: int = 0


class PlanningGame(Game):
    """One play of one planning instance.

    A message passes the turn. A tool call is answered to the agent, who moves again. A full plan
    must be answered by the user; a plan with an empty slot is a sketch that only passes the turn.
    A user who rejects moves again. Without messages the agent moves first, every plan must be full,
    and a rejection passes the turn.

    Error kinds: no_tag, unknown_tag, empty, not_yours, must_answer, nothing_pending, bad_query,
    bad_proposal, no_messages, no_search, not_your_turn, over.
    """

    num_seats = 2

    def __init__(self, instance: PlanningInstance, options: PlanningOptions) -> None:
        self.instance = instance
        self.options = options
        self._play = _Play(to_move=instance.first_seat if options.messages else AGENT)
        for action in instance.opening:
            self._open(action)
        # The prompts include the moves before this index: no `step` of this object returned them.
        self._num_opening = len(instance.opening)

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        return self._play.to_move

    @property
    def answer_due(self) -> bool:
        """Whether a full plan waits for the user's answer."""
        return self._play.pending is not None

    @property
    def num_errors(self) -> tuple[int, int]:
        """Refused moves so far, by seat."""
        return self._play.num_errors[0], self._play.num_errors[1]

    def prompt(self, seat: int) -> Prompt:
        """The user reads its role and its preferences, the agent its role, the tool and the names
        of the sites; then both read the moves made so far."""
        inst, options = self.instance, self.options
        brief = options.brief
        if _checked(seat) == USER:
            system = texts.user_rules(slots=inst.slots, messages=options.messages)
            user = texts.user_opening(inst.preferences, brief=brief)
        else:
            system = texts.agent_rules(
                inst.names, slots=inst.slots, messages=options.messages, search=options.search
            )
            user = texts.agent_opening(inst.names, brief=brief)
        log = [a for a in self._play.log[: self._num_opening] if _sees(seat, a)]
        past = texts.history(log, self._sheets(log), seat, inst, brief=brief)
        if brief:
            return Prompt("", f"{user}\n{past}" if past else user)
        if past:
            user += f"\n\nThe game so far:\n{past}"
        if self._play.to_move == seat and len(self._play.log) == self._num_opening:
            user += "\n\nIt is your move." if past else "\n\nYou move first."
        return Prompt(system, user)

    def step(self, seat: int, text: str) -> Step:
        """Try a move. A refused one changes only the error count and is reported to the mover."""
        play = self._play
        try:
            action = self._read(_checked(seat), text)
        except PlayerError as error:
            play.num_errors[seat] += 1
            if seat == play.to_move:
                play.num_errors_this_turn += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("", ""))
        self._apply(action)
        for_mover = action.result
        if action.kind == "reject" and play.to_move == USER:
            for_mover = texts.reject_text(brief=self.options.brief)
        for_other = ""
        if action.kind != "tool":
            sheet = self._sheets([action])[0] if action.plan is not None else None
            for_other = texts.read_by(
                1 - seat, action, self.instance, sheet, brief=self.options.brief
            )
        observations = (for_mover, for_other) if seat == USER else (for_other, for_mover)
        return Step(seat, action.kind, None, None, observations)

    def clone(self) -> Self:
        """An independent copy; the instance and the immutable moves are shared."""
        twin = copy.copy(self)
        twin._play = copy.copy(self._play)
        twin._play.log = list(self._play.log)
        twin._play.num_errors = list(self._play.num_errors)
        return twin

    def view(self, seat: int) -> PlanningView:
        """The seat's knowledge as data."""
        inst, play = self.instance, self._play
        log = tuple(action for action in play.log if _sees(_checked(seat), action))
        is_user = seat == USER
        return PlanningView(
            seat=seat,
            names=() if is_user else inst.names,
            slots=inst.slots,
            preferences=tuple(p.text for p in inst.preferences) if is_user else (),
            sheets=self._sheets(log) if is_user else (),
            log=log,
            pending=play.pending,
            to_move=play.to_move,
            num_errors_this_turn=play.num_errors_this_turn if seat == play.to_move else 0,
            options=self.options,
        )

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """Words of messages, searches, proposals, and statements in messages, all and true."""
        num = dict.fromkeys(
            ("words", "searches", "proposals", "statements", "true_statements"), 0.0
        )
        sheet: Sheet | None = None
        proposed: tuple[str, ...] = ()
        for action in self._play.log[len(self.instance.opening) :]:
            if action.plan is not None:
                sheet = sheet_of(self.instance.sites, self.instance.preferences, action.plan)
                proposed = tuple(action.text.strip("[]").split(", "))
            if action.seat not in seats:
                continue
            num["searches"] += action.kind == "tool"
            num["proposals"] += action.kind == "propose"
            if action.kind == "message":
                true, stated = count_true(action, self.instance, sheet, proposed)
                num["words"] += len(action.text.split())
                num["statements"] += stated
                num["true_statements"] += true
        return num

    def outcome(self) -> Outcome:
        """The total in points. Both seats' reward is its place between worst and best, 0 without
        an agreement.

        `facts` holds best and worst, and the place `random` of the average plan.
        """
        inst, play = self.instance, self._play
        score = float(self._total(play.agreed)) if play.agreed is not None else 0.0
        norm = inst.norm(score) if play.agreed is not None else 0.0
        proposed = [a.plan for a in play.log if a.plan is not None and None not in a.plan]
        facts = {"best": float(inst.best), "worst": float(inst.worst)}
        facts["random"] = inst.norm(inst.mean)
        return Outcome(
            over=play.to_move is None,
            agreed=play.agreed is not None,
            score=score,
            score_norm=norm,
            rewards=(norm, norm),
            facts=facts,
            proposal_norm=inst.norm(self._total(proposed[-1])) if proposed else 0.0,
        )

    def state(self) -> dict[str, Any]:
        """Instance, options and play as plain JSON values."""
        return {
            "game": "planning",
            "instance": _plain(asdict(self.instance)),
            "options": asdict(self.options),
            "play": _plain(asdict(self._play)),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The game that `state()` described. Its prompts include the moves made so far."""
        if state.get("game") != "planning":
            raise ValueError(f'state["game"] must be "planning", got {state.get("game")!r}')
        game = cls(instance_from_dict(state["instance"]), PlanningOptions(**state["options"]))
        play = dict(state["play"])
        instance = game.instance
        play["log"] = [
            action_from_dict(action, slots=instance.slots, num_sites=len(instance.sites))
            for action in play["log"]
        ]
        for name in ("pending", "agreed"):
            play[name] = None if play[name] is None else tuple(play[name])
        play["num_errors"] = list(play["num_errors"])
        game._play = _Play(**play)
        game._num_opening = len(game._play.log)
        return game

    @classmethod
    def from_recorded(
        cls,
        record: dict[str, Any],
        num_entries: int,
        *,
        options: PlanningOptions | None = None,
        key: str = "recorded",
    ) -> Self:
        """A recorded human game after its first `num_entries` log entries, ready for play.

        This game's turn rules decide who moves next. Raises ValueError as `recorded.begun`.
        """
        return cls(begun(record, num_entries, key=key), options or PlanningOptions())

    def _sheets(self, log: Any) -> tuple[Sheet, ...]:
        """The score sheet of each proposal in the moves."""
        sites, preferences = self.instance.sites, self.instance.preferences
        plans = [action.plan for action in log if action.plan is not None]
        return tuple(sheet_of(sites, preferences, plan) for plan in plans)

    def _total(self, plan: Plan) -> int:
        return sheet_of(self.instance.sites, self.instance.preferences, plan).total

    def _open(self, action: Action) -> None:
        """Make one move of the opening.

        In recorded games people also wrote messages while a plan waited for its answer. After such
        a message the answer is still due.
        """
        self._apply(action)
        if action.kind == "message" and self._play.pending is not None:
            self._play.to_move = USER

    def _read(self, seat: int, text: str) -> Action:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""
        play, options = self._play, self.options
        if play.to_move is None:
            raise PlayerError("over", "the game is over")
        if seat != play.to_move:
            raise PlayerError("not_your_turn", "it is the other's turn")
        valid = self._valid_tags(seat)
        if options.private_reasoning:
            text = drop_reasoning(text, KINDS)
        split = split_move(text)
        if split is None:
            raise PlayerError("no_tag", f"line 1 has no tag; start with {valid}")
        tag, content = split
        if tag not in KINDS:
            raise PlayerError("unknown_tag", f"unknown tag [{tag}]; use {valid}")
        if _OWNER.get(tag, seat) != seat:
            raise PlayerError("not_yours", f"only the other can [{tag}]; use {valid}")
        answering = tag in ("accept", "reject")
        if play.pending is not None and not answering:
            raise PlayerError("must_answer", f"answer the plan first: {valid}")
        if tag == "message" and not options.messages:
            raise PlayerError("no_messages", f"messages are off; use {valid}")
        if tag == "tool" and not options.search:
            raise PlayerError("no_search", f"the search tool is off; use {valid}")
        if answering:
            if play.pending is None:
                raise PlayerError("nothing_pending", f"no full plan to {tag}; use {valid}")
            return Action(seat, tag, "")
        if not content:
            raise PlayerError("empty", f"nothing after [{tag}]")
        if tag == "tool":
            return Action(seat, "tool", content, result=search(content, self.instance.sites))
        if tag == "message":
            return Action(seat, "message", content)
        names = self.instance.names
        plan = parse_plan(content, names, slots=self.instance.slots)
        if None in plan and not options.messages:
            raise PlayerError("bad_proposal", "without messages every slot needs a site")
        return Action(seat, "propose", render_plan(plan, names), plan)

    def _valid_tags(self, seat: int) -> str:
        if self._play.pending is not None:
            return "[accept] or [reject]"
        tags = ["[message]"] if self.options.messages else []
        if seat == AGENT:
            tags += ["[tool]"] if self.options.search else []
            tags.append("[propose]")
        return " or ".join(tags)

    def _apply(self, action: Action) -> None:
        """Apply a legal move to the state of play."""
        play = self._play
        play.log.append(action)
        play.num_errors_this_turn = 0
        match action.kind:
            case "message":
                play.to_move = 1 - action.seat
            case "propose":
                play.pending = action.plan if None not in (action.plan or ()) else None
                play.to_move = USER
            case "accept":
                play.agreed, play.pending = play.pending, None
                play.to_move = None
            case "reject":
                play.pending = None
                play.to_move = USER if self.options.messages else AGENT


def _sees(seat: int, action: Action) -> bool:
    """Whether a seat knows of a move: tool calls are private."""
    return action.kind != "tool" or action.seat == seat


def _plain(value: Any) -> Any:
    """The value with all tuples replaced by lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _checked(seat: int) -> int:
    if seat not in (USER, AGENT):
        raise ValueError(f"seat must be 0 or 1, got {seat}")
    return seat
