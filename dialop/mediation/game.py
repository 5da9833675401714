"""The rules of mediation, the group-flight game of DialOp.

Two users (seats 0 and 1) and an agent (seat 2) share one score. Room `i` is the chat of user `i`
and the agent. Each room has its own turn: the user starts, and a message passes the turn. Users
with the turn move first, user 0 before user 1; the agent moves when it has the turn in both rooms.
A proposal goes to both rooms; each user answers once, then it is booked or dropped. A game that
stops early has no agreement. Source: Lin, Tomlin, Andreas, Eisner, "Decision-Oriented Dialogue for
Human-AI Collaboration", TACL 12 (2024); docs/notes/mediation.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from dialop.game import Outcome, PlayerError, Prompt
from dialop.logged import LoggedGame, Rules, filled
from dialop.mediation import texts
from dialop.mediation.moves import ALL, TO, parse_proposal, render_proposal, split_recipient
from dialop.mediation.records import (
    AGENT,
    NUM_SEATS,
    USERS,
    Act,
    AgentView,
    MediationInstance,
    UserView,
)
from dialop.mediation.score import (
    calendar_costs,
    conflicts,
    pair_costs,
    pair_scores,
    points_of,
    shared_conflicts,
)
from dialop.mediation.scripted import Stated, believed_pairs, stated_by
from dialop.mediation.statements import count_true
from dialop.tags import drop_reasoning, split_move

_ROUNDING = 1e-9  # points by which equal believed scores may differ


class MediationGame(LoggedGame):
    """One play of one mediation instance.

    Error kinds: no_tag, unknown_tag, empty, no_recipient, bad_recipient, must_answer,
    nothing_pending, only_agent, only_users, bad_proposal, no_flight, no_messages, not_your_turn,
    over.
    """

    name = "mediation"
    num_seats = NUM_SEATS
    instance_type, move_type = MediationInstance, Act
    played = ("to_speak", "pending", "answers", "agreed")

    def __init__(self, instance: MediationInstance, options: Rules) -> None:
        # Computed once and shared by clones, because it never changes.
        users = instance.users
        self._num_flights = len(users[0].flights), len(users[1].flights)
        self._costs = tuple(tuple(calendar_costs(user).tolist()) for user in users)
        self._conflicts = tuple(tuple(shared_conflicts(user).tolist()) for user in users)
        # Whether the user, not the agent, has the turn in its room; only used with messages.
        self.to_speak = [True, True]
        # Each user's answer to the pending proposal, None if it has not answered.
        self.answers: list[bool | None] = [None, None]
        super().__init__(instance, options, opening=instance.opening)

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        if self.agreed is not None:
            return None
        if self.pending is not None:
            return next(user for user in USERS if self.answers[user] is None)
        speakers = [user for user in USERS if self.options.messages and self.to_speak[user]]
        return speakers[0] if speakers else AGENT

    def prompt(self, seat: int) -> Prompt:
        """Rules and lists (full) or only numbers (brief), then the moves that the seat knows."""
        view, brief = self.view(seat), self.options.brief
        shown = [self._text_before(seat, act) for act in self.log[: self._num_opening]]
        past = "\n".join(text for text in shown if text)
        if isinstance(view, AgentView):
            own = texts.brief_agent_board(view) if brief else texts.agent_board(view)
            return self._prompt(seat, texts.agent_rules(view), own, past)
        own = texts.cost_lines(enumerate(self._costs[seat])) if brief else texts.user_board(view)
        return self._prompt(seat, texts.user_rules(view), own, past)

    def view(self, seat: int) -> UserView | AgentView:
        """The seat's knowledge as data: its lists and the moves of its rooms."""
        inst, brief = self.instance, self.options.brief
        known = self._known(seat) | {
            "log": tuple(seen for act in self.log if (seen := self._seen(seat, act)) is not None),
            "to_move": seat if self.seat_to_move == seat else None,
            "max_price_pref": inst.max_price_pref,
            "max_arrival_pref": inst.max_arrival_pref,
        }
        if seat in USERS:
            user = inst.users[seat]
            return UserView(
                **known,
                calendar_costs=self._costs[seat],
                flights=() if brief else user.flights,
                events=() if brief else user.events,
                answer_due=self.pending is not None and self.answers[seat] is None,
            )
        price, arrival = (
            not brief or inst.max_price_pref > 0,
            not brief or inst.max_arrival_pref > 0,
        )
        shared = (tuple((e.start, e.end) for e in user.events if e.shared) for user in inst.users)
        return AgentView(
            **known,
            conflicts=self._conflicts,
            prices=tuple(tuple(f.price * price for f in u.flights) for u in inst.users),
            arrivals=tuple(tuple(f.end * arrival for f in u.flights) for u in inst.users),
            flights=() if brief else tuple(user.flights for user in inst.users),
            shared=() if brief else tuple(shared),
        )

    def outcome(self) -> Outcome:
        """The outcome, with the score in points. All seats get its place between the worst and the
        best pair as reward, 0 without an agreement."""
        inst = self.instance
        proposed = [act.flights for act in self.log if act.flights is not None]
        facts = {"best": float(inst.best), "worst": float(inst.worst)}
        alone = inst.norm(inst.alone)
        return self._outcome(partial(points_of, inst), proposed, {**facts, "alone": alone})

    def reach(self) -> list[tuple[float, ...]]:
        """As in `Game.reach`, given what the agent sees and the users' statements in messages.
        Pairs that look equally good count by their mean."""
        inst, view = self.instance, self.view(AGENT)
        assert isinstance(view, AgentView)
        scores = pair_scores(inst.users, inst.arrival_pref)

        def known(number: int) -> tuple[float, ...]:
            stated = stated_by(replace(view, log=view.log[:number]), listen=True)
            first, second = (self._true_part(user, stated[user]) for user in USERS)
            points = believed_pairs(view, (first, second))
            score = float(scores[points >= points.max() - _ROUNDING].mean())
            return (inst.norm(score),) * NUM_SEATS

        return [known(number) for number in self._times]

    def _true_part(self, user: int, stated: Stated) -> Stated:
        """The true part of a user's statements, without the flights that it rejected."""
        own, events = dict(enumerate(self._costs[user])), self.instance.users[user].events
        spans = [(event.start, event.end, event.importance) for event in events]
        return Stated(
            costs=dict(stated.costs.items() & own.items()),
            events=[span for span in stated.events if tuple(span) in spans],
            terms=[
                (pair, terms)
                for pair, terms in stated.terms
                if terms == pair_costs(self.instance, pair)[user]
            ],
        )

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """Counts of these seats' words and moves in this game, without the opening.

        Words and questions are counted in all messages, statements in users' messages
        (docs/metrics.md).
        """
        names = ("words", "proposals", "rejections", "questions", "statements", "true_statements")
        sums = dict.fromkeys(names, 0.0)
        for number, act in enumerate(self.log):
            if number < len(self.instance.opening) or act.seat not in seats:
                continue
            sums["proposals"] += act.kind == "propose"
            sums["rejections"] += act.kind == "reject"
            if act.kind == "message":
                sums["words"] += len(act.text.split())
                sums["questions"] += "?" in act.text
                view = self.view(act.seat)
                if isinstance(view, UserView):
                    seen = (self._seen(act.seat, earlier) for earlier in self.log[:number])
                    true, stated = count_true(view, act.text, [*filter(None, seen)])
                    sums["statements"] += stated
                    sums["true_statements"] += true
        return sums

    def _open(self, move: Act) -> None:
        """Make one move of the opening.

        People also wrote out of turn or while a proposal was pending, answered a dropped proposal,
        or changed an answer. A message out of turn passes its room's turn as usual; the other moves
        are only logged.
        """
        answers = move.kind in ("accept", "reject")
        if (answers and (self.pending is None or self.answers[move.seat] is not None)) or (
            move.kind == "message" and self.pending is not None
        ):
            self.log.append(move)
        else:
            self._make(move)

    def _read(self, seat: int, text: str) -> Act:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""
        self._check_turn(seat)
        return self._read_user(seat, text) if seat in USERS else self._read_agent(text)

    def _read_user(self, seat: int, text: str) -> Act:
        valid = "[accept] or [reject]" if self.answer_due else "[message]"
        tag, content = self._split(text, valid)
        self._check_tag(tag, valid)
        if tag == "propose":
            raise PlayerError("only_agent", f"only the agent proposes; use {valid}")
        if self._answers(tag, valid):
            return Act(seat, tag, "", seat)
        return Act(seat, "message", filled(content, tag), seat)

    def _read_agent(self, text: str) -> Act:
        messages = [f"{room}: [message]" for room in USERS] if self.options.messages else []
        valid = " or ".join([*messages, "all: [propose]"])
        if self.options.private_reasoning:
            text = drop_reasoning(text, ("message", "propose"), TO)
        recipient, rest = split_recipient(text)
        split = split_move(rest)
        if split is None:
            raise PlayerError("no_tag", f"no recipient and tag; start with {valid}")
        tag, content = split
        self._check_tag(tag, valid)
        if tag in ("accept", "reject"):
            raise PlayerError("only_users", f"only users {tag} a proposal; use {valid}")
        self._check_messages(tag, valid)
        if recipient is None:
            raise PlayerError("no_recipient", f"[{tag}] has no recipient; start with {valid}")
        if tag == "message":
            if recipient == ALL:
                raise PlayerError("bad_recipient", f"a message has one recipient; use {valid}")
            return Act(AGENT, "message", filled(content, tag), int(recipient))
        if recipient != ALL:
            raise PlayerError("bad_recipient", f"a proposal goes to all; use {valid}")
        pair = parse_proposal(filled(content, tag), self._num_flights)
        # The log has the proposal in its canonical form, not in the agent's spelling.
        return Act(AGENT, "propose", render_proposal(pair), None, pair)

    def _apply(self, move: Act) -> tuple[str, ...]:
        observations = [""] * NUM_SEATS
        if move.kind == "message":
            assert move.room is not None
            other = AGENT if move.seat in USERS else move.room
            self.to_speak[move.room] = move.seat == AGENT
            observations[other] = texts.message_text(move, brief=self.options.brief)
        elif move.kind == "propose":
            self.pending, self.answers = move.flights, [None, None]
            for seat in range(NUM_SEATS):
                observations[seat] = self._text_for(seat, move)
        else:
            self.answers[move.seat] = move.kind == "accept"
            observations[AGENT] = self._text_for(AGENT, move)
            if None not in self.answers:
                pairs = zip(observations, self._resolve(), strict=True)
                observations = ["\n".join(filter(None, pair)) for pair in pairs]
        return tuple(observations)

    def _resolve(self) -> list[str]:
        """Book or drop the proposal that both users have answered; return each seat's text."""
        brief, messages = self.options.brief, self.options.messages
        if all(self.answers):
            self.agreed, self.pending = self.pending, None
            return [texts.booked(brief=brief)] * NUM_SEATS
        self.pending = None
        read = []
        for user in USERS:
            rejected = self.answers[user] is False
            self.to_speak[user] = rejected
            read.append(texts.dropped(rejected=rejected, messages=messages, brief=brief))
        return [*read, ""]

    def _text_for(self, seat: int, act: Act) -> str:
        """A seat's text about a proposal or an answer, "" if it does not learn about it."""
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
        """The move as the seat knows it; None for a move in another room."""
        if seat == AGENT:
            return act
        if act.flights is None:
            return act if act.room == seat else None
        own = act.flights[seat]
        pair = (own, -1) if seat == 0 else (-1, own)
        costs = pair_costs(self.instance, act.flights)[seat]
        return replace(act, text=f"id {own}", flights=pair, costs=costs)

    def _text_before(self, seat: int, act: Act) -> str:
        """A move made before play, as in the seat's prompt; "" if it is not shown."""
        if self._seen(seat, act) is None:
            return ""
        text = self._text_for(seat, act)
        if act.seat != seat:
            return text or texts.message_text(act, brief=self.options.brief)
        if act.kind == "propose":
            return f"You: all: [propose] {act.text}" + (f"\n{text}" if text else "")
        who = f"You to user {act.room}" if seat == AGENT else "You"
        return texts.attributed(who, act, brief=self.options.brief)
