"""The rules of reviewer-paper matching, the "Optimization" game of DialOp.

Two seats see different, separately scaled parts of one value table and must agree on a perfect
matching. Values are in the table's units (0 up to `max_value`, exclusive); `score_norm` is the
share of the best matching. Knows no tokens, retries or turn limits: a game that is stopped early
has no agreement. Source: Lin, Tomlin, Andreas, Eisner, "Decision-Oriented Dialogue for Human-AI
Collaboration", TACL 12 (2024); proposals are scored by the pairs they name.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from dialop.game import Game, Outcome, PlayerError, Prompt, Step
from dialop.matching import texts
from dialop.matching.board import (
    KINDS,
    Action,
    MatchingInstance,
    MatchingOptions,
    MatchingView,
    action_from_dict,
    instance_from_dict,
    pairs_from_lists,
)
from dialop.matching.proposal import Pairs, parse_proposal, render_proposal
from dialop.matching.recorded import begun
from dialop.tags import drop_reasoning, split_move

__all__ = [
    "Action",
    "MatchingGame",
    "MatchingInstance",
    "MatchingOptions",
    "MatchingView",
    "new_game",
]


@dataclass(slots=True)
class _Play:
    """The state that changes during play."""

    log: list[Action] = field(default_factory=list)
    to_move: int | None = 0
    pending: Pairs | None = None
    pending_seat: int | None = None
    agreed: Pairs | None = None
    num_errors: list[int] = field(default_factory=lambda: [0, 0])
    num_errors_this_turn: int = 0


class MatchingGame(Game):
    """One play of one matching instance.

    Error kinds: no_tag, unknown_tag, empty, must_answer, nothing_pending, bad_proposal,
    no_messages, not_your_turn, over.
    """

    num_seats = 2

    def __init__(
        self,
        instance: MatchingInstance,
        options: MatchingOptions,
        *,
        demonstrations: tuple[tuple[tuple[str, str], ...], str] = ((), ""),
    ) -> None:
        """`demonstrations` are the `earlier` and `between` of every prompt."""
        self.instance = instance
        self.options = options
        self._earlier, self._between = demonstrations
        # Each seat's board, as data and as text, never changes, so clones share it.
        self._displayed = tuple(instance.displayed(seat) for seat in range(self.num_seats))
        write_board = texts.cell_lines if options.brief else texts.grid
        self._boards = tuple(
            write_board(d, instance.reviewers, papers=instance.papers) for d in self._displayed
        )
        self._play = _Play(to_move=instance.first_seat)
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
        """Whether a proposal waits for an answer from the seat to move."""
        return self._play.pending is not None

    @property
    def num_errors(self) -> tuple[int, int]:
        """Refused moves so far, by seat."""
        return self._play.num_errors[0], self._play.num_errors[1]

    def prompt(self, seat: int) -> Prompt:
        """Rules and grid (full) or one line per cell (brief), then the moves made so far."""
        inst, brief = self.instance, self.options.brief
        board = self._boards[_checked(seat)]
        moves = [(a.seat, a.kind, self._shown(a)) for a in self._play.log[: self._num_opening]]
        past = texts.history(moves, seat, brief=brief)
        earlier, between = self._earlier, self._between
        if brief:
            return Prompt("", f"{board}\n{past}" if past else board, earlier, between)
        system = texts.rules(
            inst.reviewers,
            inst.papers,
            unknown=inst.public_unknown,
            messages=self.options.messages,
        )
        user = board
        if past:
            user += f"\n\nThe game so far:\n{past}"
            if self._play.to_move == seat and len(self._play.log) == self._num_opening:
                user += "\n\nIt is your move."
        elif inst.first_seat == seat:
            user += "\n\nYou move first."
        return Prompt(system, user, earlier, between)

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
        brief = self.options.brief
        for_partner = texts.partner_text(action.kind, action.text, brief=brief)
        for_mover = texts.mover_text(action.kind, brief=brief)
        observations = (for_mover, for_partner) if seat == 0 else (for_partner, for_mover)
        return Step(seat, action.kind, None, None, observations)

    def clone(self) -> Self:
        """An independent copy; the instance and the immutable actions are shared."""
        twin = copy.copy(self)
        play = self._play
        twin._play = copy.copy(play)
        twin._play.log = list(play.log)
        twin._play.num_errors = list(play.num_errors)
        return twin

    def view(self, seat: int) -> MatchingView:
        """The seat's knowledge as data: its own displayed values and the public log."""
        inst, play = self.instance, self._play
        return MatchingView(
            seat=seat,
            size=inst.size,
            reviewers=inst.reviewers,
            papers=inst.papers,
            displayed=self._displayed[_checked(seat)],
            public_unknown=inst.public_unknown,
            log=tuple(play.log),
            pending=play.pending,
            pending_seat=play.pending_seat,
            to_move=play.to_move,
            num_errors_this_turn=play.num_errors_this_turn if seat == play.to_move else 0,
            options=self.options,
        )

    def outcome(self) -> Outcome:
        """The score in the table's units. Both seats' reward is its share of the best score, 0
        without an agreement."""
        inst, agreed = self.instance, self._play.agreed
        score = float(inst.value(agreed)) if agreed is not None else 0.0
        norm = inst.norm(score) if agreed is not None else 0.0
        facts = {
            "best": float(inst.best),
            "solo_0": inst.norm(inst.solo[0]),
            "solo_1": inst.norm(inst.solo[1]),
        }
        proposals = [action.pairs for action in self._play.log if action.pairs is not None]
        return Outcome(
            over=self._play.to_move is None,
            agreed=agreed is not None,
            score=score,
            score_norm=norm,
            rewards=(norm, norm),
            facts=facts,
            proposal_norm=inst.norm(float(inst.value(proposals[-1]))) if proposals else 0.0,
        )

    def state(self) -> dict[str, Any]:
        """Instance, options and play as plain JSON values."""
        return {
            "game": "matching",
            "instance": _plain(asdict(self.instance)),
            "options": asdict(self.options),
            "play": _plain(asdict(self._play)),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The game that `state()` described. Its prompts include the moves made so far."""
        if state.get("game") != "matching":
            raise ValueError(f'state["game"] must be "matching", got {state.get("game")!r}')
        game = cls(instance_from_dict(state["instance"]), MatchingOptions(**state["options"]))
        play = dict(state["play"])
        play["log"] = [action_from_dict(action) for action in play["log"]]
        for name in ("pending", "agreed"):
            play[name] = pairs_from_lists(play[name])
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
        options: MatchingOptions | None = None,
        key: str = "recorded",
    ) -> Self:
        """A recorded human game after its first `num_entries` log entries, ready for play.

        This game's turn rules decide who moves next: an unanswered proposal waits for the partner,
        a message passes the turn, and a seat that rejects moves again. With no entries, the
        recorded first speaker moves first.

        Raises:
            ValueError: if `num_entries` lies outside the log, or a proposal has names that are not
                on the roster.
        """
        return cls(begun(record, num_entries, key=key), options or MatchingOptions())

    def _open(self, action: Action) -> None:
        """Make one move of the opening.

        In recorded games people also wrote messages while a proposal was pending. After such a
        message the answer to the proposal is still due.
        """
        answer_still_due = action.kind == "message" and self._play.pending is not None
        self._apply(action)
        if answer_still_due:
            self._play.to_move = 1 - _checked(self._play.pending_seat)

    def _read(self, seat: int, text: str) -> Action:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""
        play = self._play
        if play.to_move is None:
            raise PlayerError("over", "the game is over")
        if seat != play.to_move:
            raise PlayerError("not_your_turn", "it is your partner's turn")
        valid = self._valid_tags()
        if self.options.private_reasoning:
            text = drop_reasoning(text, KINDS)
        split = split_move(text)
        if split is None:
            raise PlayerError("no_tag", f"line 1 has no tag; start with {valid}")
        tag, content = split
        answering = tag in ("accept", "reject")
        if play.pending is not None and not answering:
            raise PlayerError("must_answer", f"answer the proposal first: {valid}")
        if tag not in KINDS:
            raise PlayerError("unknown_tag", f"unknown tag [{tag}]; use {valid}")
        if tag == "message" and not self.options.messages:
            raise PlayerError("no_messages", f"messages are off; use {valid}")
        if answering:
            if play.pending is None:
                raise PlayerError("nothing_pending", f"no proposal to {tag}; use {valid}")
            return Action(seat, tag, "")
        if not content:
            raise PlayerError("empty", f"nothing after [{tag}]")
        if tag == "message":
            return Action(seat, tag, content)
        reviewers, papers, brief = self.instance.reviewers, self.instance.papers, self.options.brief
        pairs = parse_proposal(content, reviewers, papers=papers, brief=brief)
        # The log keeps the proposal in its canonical form, not as the proposer spelt it.
        shown = render_proposal(pairs, reviewers, papers=papers, brief=brief)
        return Action(seat, "propose", shown, pairs)

    def _valid_tags(self) -> str:
        if self._play.pending is not None:
            return "[accept] or [reject]"
        return "[message] or [propose]" if self.options.messages else "[propose]"

    def _apply(self, action: Action) -> None:
        """Apply a legal move to the state of play."""
        play = self._play
        play.log.append(action)
        play.num_errors_this_turn = 0
        if action.kind == "accept":
            play.agreed, play.pending, play.pending_seat = play.pending, None, None
            play.to_move = None
        elif action.kind == "reject":
            play.pending, play.pending_seat = None, None
            play.to_move = action.seat
        else:
            if action.kind == "propose":
                play.pending, play.pending_seat = action.pairs, action.seat
            play.to_move = 1 - action.seat

    def _shown(self, action: Action) -> str:
        """A move's content as the partner reads it: messages verbatim, proposals rendered."""
        if action.pairs is None:
            return action.text
        inst = self.instance
        return render_proposal(
            action.pairs, inst.reviewers, papers=inst.papers, brief=self.options.brief
        )


def new_game(instance: MatchingInstance, options: MatchingOptions) -> MatchingGame:
    """A new game of an instance."""
    return MatchingGame(instance, options)


def _plain(value: Any) -> Any:
    """The value with all tuples replaced by lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _checked(seat: int | None) -> int:
    if seat not in (0, 1):
        raise ValueError(f"seat must be 0 or 1, got {seat}")
    return seat
