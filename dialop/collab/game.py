"""The rules of a collaboration.

The user (seat 0) knows the goal and has made a request before the first move, so the assistant
(seat 1) moves first. They exchange plain messages until the assistant's `[answer]` or the user's
`[end]`. The assistant's reward is

    R(t | g) = accuracy * R_task(t, g) + interactivity * R_interactivity(t)

and the user's reward is the first term, each without the costs of tokens and words, which the game
does not know. R_task is the answer's grade in [0, 1], 0 without an answer. R_interactivity in
[0, 1] is the judge's rating, or otherwise the rating by a fixed rule. Source: Wu et al., CollabLLM,
arXiv 2502.00640, section 3; this project adds the user's reward.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from dialop.collab import texts
from dialop.collab.grading import grade, interactivity, solved
from dialop.collab.task import (
    ANSWER,
    ASSISTANT,
    END,
    USER,
    CollabInstance,
    CollabOptions,
    CollabView,
)
from dialop.game import Outcome, PlayerError, Prompt
from dialop.logged import LoggedGame, Move
from dialop.tags import after_thought, split_move

_CLOSING = re.compile(rf"^[ \t]*\[[ \t]*({ANSWER}|{END})[ \t]*\]", re.IGNORECASE | re.MULTILINE)
_OWNER = {ANSWER: ASSISTANT, END: USER}


class CollabGame(LoggedGame):
    """One conversation about one task.

    Error kinds: empty, not_yours, not_your_turn, over, and solved (a user's message with the result
    of a math task).
    """

    name = "collab"
    num_seats = 2
    options_type = CollabOptions
    instance_type, move_type = CollabInstance, Move
    turn_error = "it is the other's turn"
    over_error = "the conversation is over"
    past_heading = "The conversation so far:"
    played = ("to_move", "rating")
    rating: float | None = None  # by a judge

    def __init__(self, instance: CollabInstance, options: CollabOptions) -> None:
        super().__init__(instance, options, first=ASSISTANT)

    def prompt(self, seat: int) -> Prompt:
        """The user's role and goal, or the assistant's role and the request."""
        inst = self.instance
        past = texts.history(self.log[: self._num_opening], self._checked(seat))
        if seat == ASSISTANT:
            return self._prompt(seat, texts.assistant_rules(inst.task), inst.request, past)
        opening = texts.user_opening(inst, brief=self.options.brief)
        return self._prompt(seat, texts.USER_RULES, opening, past)

    def view(self, seat: int) -> CollabView:
        """The seat's knowledge as data."""
        inst = self.instance
        return CollabView(
            **self._known(seat),
            task=inst.task,
            request=inst.request,
            goal=inst.goal if seat == USER else None,
            log=self.moves,
        )

    def outcome(self) -> Outcome:
        """The outcome, with the answer's grade in [0, 1] as score.

        `facts` holds the number of moves and words of each seat, and the rating of interactivity.
        """
        log, options = self.log, self.options
        answers = [move.text for move in log if move.kind == ANSWER]
        score = grade(self.instance, answers[0]) if answers else 0.0
        facts = {"interactivity": self._interactivity()}
        for seat, name in ((USER, "user"), (ASSISTANT, "assistant")):
            moves = [move.text for move in log if move.seat == seat]
            facts[f"{name}_moves"] = float(len(moves))
            facts[f"{name}_words"] = float(sum(len(text.split()) for text in moves))
        graded = options.accuracy * score
        return Outcome(
            over=self.to_move is None,
            agreed=bool(answers),
            score=score,
            score_norm=score,
            rewards=(graded, graded + options.interactivity * facts["interactivity"]),
            facts=facts,
        )

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """Questions by these seats, the user's words, and the rating of interactivity."""
        log = self.log[self._num_opening :]
        said = [move.text for move in log if move.kind == "message" and move.seat in seats]
        user = [move.text for move in log if move.seat == USER]
        return {
            "questions": float(sum("?" in text for text in said)),
            "user_words": float(sum(len(text.split()) for text in user)),
            "interactivity": self._interactivity(),
        }

    def _interactivity(self) -> float:
        rating = self.rating
        return interactivity(self.instance, self.log) if rating is None else rating

    def _apply(self, move: Move) -> tuple[str, str]:
        self.to_move = 1 - move.seat if move.kind == "message" else None
        if move.seat == USER:
            return "", texts.partner_text(move)
        if move.kind == ANSWER or self.options.brief:
            return texts.partner_text(move), ""
        return texts.user_turn(self.instance, move), ""

    def _read(self, seat: int, text: str) -> Move:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text.

        A line that starts with a closing tag ends the game. The text after the tag is the move's
        content. The lines before an answer are reasoning and are dropped; the lines before a user's
        end are its last words. Any other text is a message.
        """
        self._check_turn(seat)
        if self.options.private_reasoning:
            text = after_thought(text)
        closing = _CLOSING.search(text)
        if closing is not None:
            kind, content = closing[1].lower(), text[closing.end() :].strip()
            if _OWNER[kind] != seat:
                valid = END if seat == USER else ANSWER
                raise PlayerError("not_yours", f"only the other can [{kind}]; you can [{valid}]")
            if kind == ANSWER and not content:
                raise PlayerError("empty", "nothing after [answer]")
            if kind == END:
                content = f"{_said(text[: closing.start()])}\n{content}".strip()
            return Move(seat, kind, content)
        content = _said(text)
        if not content:
            raise PlayerError("empty", "you said nothing")
        if seat == USER and solved(self.instance, content):
            raise PlayerError("solved", "do not work out the result; tell only what you know")
        return Move(seat, "message", content)


def _said(text: str) -> str:
    """The content of a message. A [message] tag, which other games need, has no effect here."""
    split = split_move(text)
    return split[1] if split is not None and split[0] == "message" else text.strip()
