"""The rules of mediation, the group-flight game of DialOp.

Two users (seats 0 and 1) and an agent (seat 2) share one score. Room `i` holds user `i` and the
agent. Each room has a turn: both users begin, and a message passes the room's turn. Users whose
turn it is move first, user 0 before user 1; the agent moves when both rooms wait for it. A proposal
goes to both rooms; each user answers it once, then it is booked or dropped. Knows no tokens,
retries or turn limits: a game that is stopped early has no agreement. Source: Lin, Tomlin, Andreas,
Eisner, "Decision-Oriented Dialogue for Human-AI Collaboration", TACL 12 (2024); docs/mediation.md
lists what differs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

from dialop.game import Game, Outcome, PlayerError, Prompt, Step
from dialop.mediation import texts
from dialop.mediation.moves import (
    ALL,
    drop_agent_reasoning,
    parse_proposal,
    render_proposal,
    split_recipient,
)
from dialop.mediation.records import (
    AGENT,
    KINDS,
    NUM_SEATS,
    USERS,
    Act,
    AgentView,
    MediationInstance,
    MediationOptions,
    Pair,
    UserView,
    act_from_dict,
)
from dialop.mediation.score import calendar_costs, conflicts, pair_costs, shared_conflicts
from dialop.mediation.statements import count_true
from dialop.mediation.store import instance_from_dict, plain
from dialop.tags import drop_reasoning, split_move


@dataclass(slots=True)
class _Play:
    """The state that changes during play.

    `to_speak[user]` says whether the user has the turn in the own room; otherwise the agent has.
    Without messages it has no effect. `answers[user]` is the user's answer to the pending proposal,
    None before it.
    """

    log: list[Act] = field(default_factory=list)
    to_speak: list[bool] = field(default_factory=lambda: [True, True])
    pending: Pair | None = None
    answers: list[bool | None] = field(default_factory=lambda: [None, None])
    agreed: Pair | None = None
    num_errors: list[int] = field(default_factory=lambda: [0] * NUM_SEATS)
    num_errors_this_turn: int = 0


class MediationGame(Game):
    """One play of one mediation instance.

    Error kinds: no_tag, unknown_tag, empty, no_recipient, bad_recipient, must_answer,
    nothing_pending, only_agent, only_users, bad_proposal, no_flight, no_messages, not_your_turn,
    over.
    """

    num_seats = NUM_SEATS

    def __init__(self, instance: MediationInstance, options: MediationOptions) -> None:
        self.instance = instance
        self.options = options
        # What never changes is computed once; clones share it.
        users = instance.users
        self._num_flights = len(users[0].flights), len(users[1].flights)
        self._costs = tuple(tuple(calendar_costs(user).tolist()) for user in users)
        self._conflicts = tuple(tuple(shared_conflicts(user).tolist()) for user in users)
        self._play = _Play()
        for act in instance.opening:
            self._open(act)
        # The prompts include the moves before this index: no `step` of this object returned them.
        self._num_opening = len(instance.opening)

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        play = self._play
        if play.agreed is not None:
            return None
        if play.pending is not None:
            return next(user for user in USERS if play.answers[user] is None)
        speakers = [user for user in USERS if self.options.messages and play.to_speak[user]]
        return speakers[0] if speakers else AGENT

    @property
    def answer_due(self) -> bool:
        """Whether a proposal waits for an answer from the seat to move."""
        return self._play.pending is not None

    @property
    def num_errors(self) -> tuple[int, ...]:
        """Refused moves so far, by seat."""
        return tuple(self._play.num_errors)

    def prompt(self, seat: int) -> Prompt:
        """Rules and lists (full) or numbers alone (brief), then the moves that the seat knows."""
        view, brief = self.view(_checked(seat)), self.options.brief
        shown = [self._retold(seat, act) for act in self._play.log[: self._num_opening]]
        past = "\n".join(text for text in shown if text)
        if brief:
            board = (
                texts.brief_agent_board(view)
                if isinstance(view, AgentView)
                else texts.brief_user_board(view)
            )
            return Prompt("", f"{board}\n{past}" if past else board)
        if isinstance(view, AgentView):
            system, user = texts.agent_rules(view), texts.agent_board(view)
        else:
            system, user = texts.user_rules(view), texts.user_board(view)
        return Prompt(system, f"{user}\n\nThe game so far:\n{past}" if past else user)

    def step(self, seat: int, text: str) -> Step:
        """Try a move. A refused one changes only the error count and is reported to the mover."""
        play = self._play
        try:
            act = self._read(_checked(seat), text)
        except PlayerError as error:
            play.num_errors[seat] += 1
            if seat == self.seat_to_move:
                play.num_errors_this_turn += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("",) * NUM_SEATS)
        return Step(seat, act.kind, None, None, self._apply(act))

    def clone(self) -> Self:
        """An independent copy; the instance and the immutable moves are shared."""
        twin = copy.copy(self)
        play = self._play
        twin._play = replace(
            play,
            log=list(play.log),
            to_speak=list(play.to_speak),
            answers=list(play.answers),
            num_errors=list(play.num_errors),
        )
        return twin

    def view(self, seat: int) -> UserView | AgentView:
        """The seat's knowledge as data: its own lists and the moves of its own rooms."""
        inst, play, brief = self.instance, self._play, self.options.brief
        mover = self.seat_to_move
        num_errors = play.num_errors_this_turn if _checked(seat) == mover else 0
        log = tuple(seen for act in play.log if (seen := self._seen(seat, act)) is not None)
        if seat in USERS:
            user = inst.users[seat]
            return UserView(
                seat=seat,
                calendar_costs=self._costs[seat],
                flights=() if brief else user.flights,
                events=() if brief else user.events,
                log=log,
                answer_due=play.pending is not None and play.answers[seat] is None,
                to_move=mover if mover == seat else None,
                num_errors_this_turn=num_errors,
                max_price_pref=inst.max_price_pref,
                max_arrival_pref=inst.max_arrival_pref,
                options=self.options,
            )
        first, second = inst.users
        price, arrival = (
            not brief or bool(b) for b in (inst.max_price_pref, inst.max_arrival_pref)
        )
        return AgentView(
            seat=seat,
            conflicts=(self._conflicts[0], self._conflicts[1]),
            prices=(
                tuple(f.price * price for f in first.flights),
                tuple(f.price * price for f in second.flights),
            ),
            arrivals=(
                tuple(f.end * arrival for f in first.flights),
                tuple(f.end * arrival for f in second.flights),
            ),
            flights=() if brief else (first.flights, second.flights),
            shared=()
            if brief
            else tuple(tuple((e.start, e.end) for e in u.events if e.shared) for u in inst.users),
            log=log,
            to_move=mover if mover == seat else None,
            num_errors_this_turn=num_errors,
            max_price_pref=inst.max_price_pref,
            max_arrival_pref=inst.max_arrival_pref,
            options=self.options,
        )

    def outcome(self) -> Outcome:
        """The score in points. All seats' reward is its place between the worst and the best pair,
        0 without an agreement."""
        inst, agreed = self.instance, self._play.agreed
        score = self._score(agreed) if agreed is not None else 0.0
        norm = inst.norm(score) if agreed is not None else 0.0
        proposals = [act.flights for act in self._play.log if act.flights is not None]
        return Outcome(
            over=agreed is not None,
            agreed=agreed is not None,
            score=score,
            score_norm=norm,
            rewards=(norm,) * NUM_SEATS,
            facts={
                "best": float(inst.best),
                "worst": float(inst.worst),
                "alone": inst.norm(inst.alone),
            },
            proposal_norm=inst.norm(self._score(proposals[-1])) if proposals else 0.0,
        )

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """What these seats said and did in this game, openings excluded.

        Words and questions are those of messages, statements those of users (docs/metrics.md).
        """
        names = ("words", "proposals", "rejections", "questions", "statements", "true_statements")
        sums = dict.fromkeys(names, 0.0)
        for number, act in enumerate(self._play.log):
            if number < self._num_opening or act.seat not in seats:
                continue
            sums["proposals"] += act.kind == "propose"
            sums["rejections"] += act.kind == "reject"
            if act.kind == "message":
                sums["words"] += len(act.text.split())
                sums["questions"] += "?" in act.text
                view = self.view(act.seat)
                if isinstance(view, UserView):
                    past = [self._seen(act.seat, earlier) for earlier in self._play.log[:number]]
                    true, stated = count_true(view, act.text, [a for a in past if a is not None])
                    sums["statements"] += stated
                    sums["true_statements"] += true
        return sums

    def state(self) -> dict[str, Any]:
        """Instance, options and play as plain JSON values."""
        return {
            "game": "mediation",
            "instance": json.loads(_as_json(self.instance)),
            "options": asdict(self.options),
            "play": plain(asdict(self._play)),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The game that `state()` described. Its prompts include the moves made so far."""
        if state.get("game") != "mediation":
            raise ValueError(f'state["game"] must be "mediation", got {state.get("game")!r}')
        game = cls(instance_from_dict(state["instance"]), MediationOptions(**state["options"]))
        play = dict(state["play"])
        play["log"] = [act_from_dict(act) for act in play["log"]]
        for name in ("pending", "agreed"):
            play[name] = None if play[name] is None else tuple(play[name])
        game._play = _Play(**play)
        game._num_opening = len(game._play.log)
        return game

    def _score(self, pair: Pair) -> float:
        return float(sum(costs.total for costs in pair_costs(self.instance, pair)))

    def _open(self, act: Act) -> None:
        """Make one move of the opening.

        People also spoke out of turn, answered a proposal that was already dropped, and changed an
        answer. Such a message passes its room's turn as any other; such an answer changes nothing,
        except that both users' last answers to a standing proposal count.
        """
        play = self._play
        if act.kind in ("accept", "reject"):
            if play.pending is None or play.answers[act.seat] is not None:
                play.log.append(act)
                return
            self._apply(act)
        elif act.kind == "message":
            play.log.append(act)
            assert act.room is not None
            if play.pending is None:
                play.to_speak[act.room] = act.seat == AGENT
        else:
            self._apply(act)

    def _read(self, seat: int, text: str) -> Act:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""
        if self._play.agreed is not None:
            raise PlayerError("over", "the game is over")
        if seat != self.seat_to_move:
            raise PlayerError("not_your_turn", "it is not your turn")
        return self._read_user(seat, text) if seat in USERS else self._read_agent(text)

    def _read_user(self, seat: int, text: str) -> Act:
        pending = self._play.pending is not None
        valid = "[accept] or [reject]" if pending else "[message]"
        if self.options.private_reasoning:
            text = drop_reasoning(text, KINDS)
        split = split_move(text)
        if split is None:
            raise PlayerError("no_tag", f"line 1 has no tag; start with {valid}")
        tag, content = split
        if tag not in KINDS:
            raise PlayerError("unknown_tag", f"unknown tag [{tag}]; use {valid}")
        if tag == "propose":
            raise PlayerError("only_agent", f"only the agent proposes; use {valid}")
        if tag == "message":
            if pending:
                raise PlayerError("must_answer", f"answer the proposal first: {valid}")
            return Act(seat, "message", _filled(content, tag), seat)
        if not pending:
            raise PlayerError("nothing_pending", f"no proposal to {tag}; use {valid}")
        return Act(seat, "accept" if tag == "accept" else "reject", "", seat)

    def _read_agent(self, text: str) -> Act:
        valid = self._agent_moves()
        if self.options.private_reasoning:
            text = drop_agent_reasoning(text)
        recipient, rest = split_recipient(text)
        split = split_move(rest)
        if split is None:
            raise PlayerError("no_tag", f"no recipient and tag; start with {valid}")
        tag, content = split
        if tag not in KINDS:
            raise PlayerError("unknown_tag", f"unknown tag [{tag}]; use {valid}")
        if tag in ("accept", "reject"):
            raise PlayerError("only_users", f"only users {tag} a proposal; use {valid}")
        if tag == "message" and not self.options.messages:
            raise PlayerError("no_messages", f"messages are off; use {valid}")
        if recipient is None:
            raise PlayerError("no_recipient", f"[{tag}] has no recipient; start with {valid}")
        if tag == "message":
            if recipient == ALL:
                raise PlayerError("bad_recipient", f"a message has one recipient; use {valid}")
            return Act(AGENT, "message", _filled(content, tag), int(recipient))
        if recipient != ALL:
            raise PlayerError("bad_recipient", f"a proposal goes to all; use {valid}")
        pair = parse_proposal(_filled(content, tag), self._num_flights)
        # The log keeps the proposal in its canonical form, not as the agent spelt it.
        return Act(AGENT, "propose", render_proposal(pair), None, pair)

    def _agent_moves(self) -> str:
        messages = [f"{room}: [message]" for room in USERS] if self.options.messages else []
        return " or ".join([*messages, "all: [propose]"])

    def _apply(self, act: Act) -> tuple[str, ...]:
        """Apply a legal move to the state of play; what each seat reads of it."""
        play = self._play
        play.log.append(act)
        play.num_errors_this_turn = 0
        observations = [""] * NUM_SEATS
        if act.kind == "message":
            assert act.room is not None
            other = AGENT if act.seat in USERS else act.room
            play.to_speak[act.room] = act.seat == AGENT
            observations[other] = texts.message_text(act, brief=self.options.brief)
        elif act.kind == "propose":
            play.pending, play.answers = act.flights, [None, None]
            for seat in range(NUM_SEATS):
                observations[seat] = self._told(seat, act)
        else:
            play.answers[act.seat] = act.kind == "accept"
            observations[AGENT] = self._told(AGENT, act)
            if None not in play.answers:
                for seat, text in enumerate(self._resolve()):
                    observations[seat] = "\n".join(t for t in (observations[seat], text) if t)
        return tuple(observations)

    def _resolve(self) -> list[str]:
        """Book or drop the proposal that both users have answered; what each seat reads of it."""
        play, brief, messages = self._play, self.options.brief, self.options.messages
        if all(play.answers):
            play.agreed, play.pending = play.pending, None
            return [texts.booked(brief=brief)] * NUM_SEATS
        play.pending = None
        read = []
        for user in USERS:
            rejected = play.answers[user] is False
            play.to_speak[user] = rejected
            read.append(texts.dropped(rejected=rejected, messages=messages, brief=brief))
        return [*read, ""]

    def _told(self, seat: int, act: Act) -> str:
        """What a seat reads of a proposal or an answer, "" if it does not learn of it."""
        brief = self.options.brief
        if act.flights is None:
            return texts.attributed(f"User {act.seat}", act, brief=brief) if seat == AGENT else ""
        users = self.instance.users
        if seat == AGENT:
            if brief:
                return ""
            flights = users[0].flights[act.flights[0]], users[1].flights[act.flights[1]]
            return texts.proposal_for_agent(flights, act.flights)
        flight = users[seat].flights[act.flights[seat]]
        return texts.proposal_for_user(
            act.flights[seat],
            pair_costs(self.instance, act.flights)[seat],
            flight=flight,
            in_conflict=conflicts(users[seat], flight),
            brief=brief,
        )

    def _seen(self, seat: int, act: Act) -> Act | None:
        """The move as the seat knows it; None for a move in a room that it is not in."""
        if seat == AGENT:
            return act
        if act.flights is None:
            return act if act.room == seat else None
        own = act.flights[seat]
        pair = (own, -1) if seat == 0 else (-1, own)
        costs = pair_costs(self.instance, act.flights)[seat]
        return replace(act, text=f"id {own}", flights=pair, costs=costs)

    def _retold(self, seat: int, act: Act) -> str:
        """A move made before this game began, as the seat's prompt shows it; "" for none."""
        if self._seen(seat, act) is None:
            return ""
        if act.seat != seat:
            told = self._told(seat, act)
            return told or texts.message_text(act, brief=self.options.brief)
        if act.kind == "propose":
            told = self._told(seat, act)
            return f"You: all: [propose] {act.text}" + (f"\n{told}" if told else "")
        who = f"You to user {act.room}" if seat == AGENT else "You"
        return texts.attributed(who, act, brief=self.options.brief)


@lru_cache(maxsize=64)
def _as_json(instance: MediationInstance) -> str:
    """The instance as JSON; the states of one game share it."""
    return json.dumps(asdict(instance))


def _filled(content: str, tag: str) -> str:
    if not content:
        raise PlayerError("empty", f"nothing after [{tag}]")
    return content


def _checked(seat: int) -> int:
    if seat not in range(NUM_SEATS):
        raise ValueError(f"seat must be 0 to {NUM_SEATS - 1}, got {seat}")
    return seat
