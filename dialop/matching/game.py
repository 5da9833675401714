"""The rules of reviewer-paper matching, the "Optimization" game of DialOp.

Two seats see different, separately scaled parts of one value table and must agree on a perfect
matching. Values are in the table's units (0 to `max_value`, exclusive); `score_norm` is the share
of the best matching. A game that stops early has no agreement. Source: Lin, Tomlin, Andreas,
Eisner, "Decision-Oriented Dialogue for Human-AI Collaboration", TACL 12 (2024); proposals are
scored by the pairs they name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from dialop.game import Outcome, Prompt
from dialop.logged import LoggedGame, Rules, filled
from dialop.matching import texts
from dialop.matching.board import Action, MatchingInstance, MatchingView, solo_value
from dialop.matching.proposal import parse_proposal, render_proposal
from dialop.matching.scripted import stated_by
from dialop.matching.statements import count_true

__all__ = ["Action", "MatchingGame", "MatchingInstance", "MatchingView"]


class MatchingGame(LoggedGame):
    """One play of one matching instance.

    Error kinds: no_tag, unknown_tag, empty, must_answer, nothing_pending, bad_proposal,
    no_messages, not_your_turn, over.
    """

    name = "matching"
    num_seats = 2
    instance_type, move_type = MatchingInstance, Action
    turn_error = "it is your partner's turn"
    played = ("to_move", "pending", "pending_seat", "agreed")
    pending_seat: int | None = None

    def __init__(
        self,
        instance: MatchingInstance,
        options: Rules,
        *,
        demonstrations: tuple[tuple[tuple[str, str], ...], str] = ((), ""),
    ) -> None:
        """`demonstrations` are the `earlier` and `between` of every prompt."""
        self._earlier, self._between = demonstrations
        # Each seat's board, as data and as text, never changes, so clones share it.
        self._displayed = tuple(instance.displayed(seat) for seat in range(self.num_seats))
        write_board = texts.cell_lines if options.brief else texts.grid
        self._boards = tuple(
            write_board(d, instance.reviewers, papers=instance.papers) for d in self._displayed
        )
        super().__init__(instance, options, first=instance.first_seat, opening=instance.opening)

    def prompt(self, seat: int) -> Prompt:
        """Rules and grid (full) or one line per cell (brief), then the moves made so far."""
        inst, options = self.instance, self.options
        board = self._boards[self._checked(seat)]
        moves = [(a.seat, a.kind, self._shown(a)) for a in self.log[: self._num_opening]]
        past = texts.history(moves, seat, brief=options.brief)
        rules = texts.rules(
            inst.reviewers, inst.papers, unknown=inst.public_unknown, messages=options.messages
        )
        prompt = self._prompt(seat, rules, board, past, says_turn=True)
        return replace(prompt, earlier=self._earlier, between=self._between)

    def view(self, seat: int) -> MatchingView:
        """The seat's knowledge as data: its own displayed values and the public log."""
        inst = self.instance
        return MatchingView(
            **self._known(seat),
            size=inst.size,
            reviewers=inst.reviewers,
            papers=inst.papers,
            displayed=self._displayed[seat],
            public_unknown=inst.public_unknown,
            log=tuple(self.log),
            pending=self.pending,
            pending_seat=self.pending_seat,
        )

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """Proposals, and all and true statements in messages."""
        sums = dict.fromkeys(("proposals", "statements", "true_statements"), 0.0)
        views = {seat: self.view(seat) for seat in seats}
        for action in self.log[self._num_opening :]:
            if action.seat in views:
                sums["proposals"] += action.kind == "propose"
            if action.seat in views and action.kind == "message":
                true, stated = count_true(views[action.seat], action.text)
                sums["statements"] += stated
                sums["true_statements"] += true
        return sums

    def reach(self) -> list[tuple[float, ...]]:
        """As in `Game.reach`. A plan has its value in the table, a cell that a seat does not know
        has the unknown value, and the last of several statements about a cell counts."""
        inst = self.instance

        def known(number: int, seat: int) -> float:
            other = replace(self.view(1 - seat), log=tuple(self.log[:number]))
            mask = np.array(inst.masks[seat], dtype=bool)
            for (r, p), value in stated_by(other, seat=1 - seat).items():
                mask[r, p] |= other.displayed[r][p] == value
            return inst.norm(solo_value(inst.table, mask.tolist(), unknown=inst.unknown))

        return [(known(number, 0), known(number, 1)) for number in self._times]

    def outcome(self) -> Outcome:
        """The outcome, with the score in the table's units. Both seats get its share of the best
        score as reward, 0 without an agreement."""
        inst = self.instance
        solo = {f"solo_{seat}": inst.norm(inst.solo[seat]) for seat in (0, 1)}
        proposed = [action.pairs for action in self.log if action.pairs is not None]
        return self._outcome(inst.value, proposed, {"best": float(inst.best), **solo})

    def _read(self, seat: int, text: str) -> Action:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""
        self._check_turn(seat)
        valid = "[message] or [propose]" if self.options.messages else "[propose]"
        valid = "[accept] or [reject]" if self.answer_due else valid
        tag, content = self._split(text, valid)
        if self._answers(tag, valid):
            return Action(seat, tag, "")
        self._check_tag(tag, valid)
        self._check_messages(tag, valid)
        if filled(content, tag) and tag == "message":
            return Action(seat, "message", content)
        reviewers, papers, brief = self.instance.reviewers, self.instance.papers, self.options.brief
        pairs = parse_proposal(content, reviewers, papers=papers, brief=brief)
        # The log has the proposal in its canonical form, not in the proposer's spelling.
        shown = render_proposal(pairs, reviewers, papers=papers, brief=brief)
        return Action(seat, "propose", shown, pairs)

    def _apply(self, move: Action) -> tuple[str, str]:
        brief = self.options.brief
        if move.kind == "accept":
            self.agreed, self.pending, self.pending_seat = self.pending, None, None
            self.to_move = None
        elif move.kind == "reject":
            self.pending, self.pending_seat = None, None
            self.to_move = move.seat
        else:
            if move.kind == "propose":
                self.pending, self.pending_seat = move.pairs, move.seat
            self.to_move = 1 - move.seat
        for_partner = texts.partner_text(move.kind, move.text, brief=brief)
        for_mover = texts.mover_text(move.kind, brief=brief)
        return (for_mover, for_partner) if move.seat == 0 else (for_partner, for_mover)

    def _shown(self, action: Action) -> str:
        """A move's content as the partner reads it: messages verbatim, proposals rendered."""
        if action.pairs is None:
            return action.text
        inst = self.instance
        return render_proposal(
            action.pairs, inst.reviewers, papers=inst.papers, brief=self.options.brief
        )
