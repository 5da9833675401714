"""The rules of a collaboration.

The user (seat 0) knows the goal and has made a request before the first move, so the assistant
(seat 1) moves first. They exchange plain messages until the assistant's `[answer]` or the user's
`[end]`. Both seats' reward is the answer's grade in [0, 1], 0 without an answer. Knows no tokens or
turn limits.
"""

from __future__ import annotations

import copy
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast

from dialop.collab import texts
from dialop.collab.grading import grade, interactivity
from dialop.collab.task import (
    ANSWER,
    ASSISTANT,
    END,
    USER,
    CollabInstance,
    CollabOptions,
    CollabView,
    Kind,
    Move,
    instance_from_dict,
)
from dialop.game import Game, Outcome, PlayerError, Prompt, Step
from dialop.tags import split_move

_CLOSING = re.compile(rf"^[ \t]*\[[ \t]*({ANSWER}|{END})[ \t]*\]", re.IGNORECASE | re.MULTILINE)
_OWNER = {ANSWER: ASSISTANT, END: USER}
_THINK_END = "</think>"


@dataclass(slots=True)
class _Play:
    """The state that changes during play."""

    log: list[Move] = field(default_factory=list)
    to_move: int | None = ASSISTANT
    num_errors: list[int] = field(default_factory=lambda: [0, 0])
    num_errors_this_turn: int = 0


class CollabGame(Game):
    """One conversation about one task.

    Error kinds: empty, not_yours, not_your_turn, over.
    """

    num_seats = 2

    def __init__(self, instance: CollabInstance, options: CollabOptions) -> None:
        self.instance = instance
        self.options = options
        self._play = _Play()
        self._num_opening = 0  # moves made before a restore, which the prompts include

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        return self._play.to_move

    def prompt(self, seat: int) -> Prompt:
        """The user reads its role and the goal; the assistant reads its role and the request."""
        inst, brief = self.instance, self.options.brief
        if _checked(seat) == USER:
            system = "" if brief else texts.user_rules()
            user = texts.user_opening(inst, brief=brief)
        else:
            system = "" if brief else texts.assistant_rules(inst.task)
            user = inst.request
        past = texts.history(self._play.log[: self._num_opening], seat)
        if past:
            user += f"\n{past}" if brief else f"\n\nThe conversation so far:\n{past}"
        return Prompt(system, user)

    def step(self, seat: int, text: str) -> Step:
        """Try a move. A refused one changes only the error count and is reported to the mover."""
        play = self._play
        try:
            move = self._read(_checked(seat), text)
        except PlayerError as error:
            play.num_errors[seat] += 1
            if seat == play.to_move:
                play.num_errors_this_turn += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("", ""))
        play.log.append(move)
        play.num_errors_this_turn = 0
        play.to_move = 1 - seat if move.kind == "message" else None
        observation = texts.partner_text(move)
        observations = ("", observation) if seat == USER else (observation, "")
        return Step(seat, move.kind, None, None, observations)

    def clone(self) -> Self:
        """An independent copy; the instance and the immutable moves are shared."""
        twin = copy.copy(self)
        twin._play = copy.copy(self._play)
        twin._play.log = list(self._play.log)
        twin._play.num_errors = list(self._play.num_errors)
        return twin

    def view(self, seat: int) -> CollabView:
        """The seat's knowledge as data."""
        inst, play = self.instance, self._play
        return CollabView(
            seat=_checked(seat),
            task=inst.task,
            request=inst.request,
            goal=inst.goal if seat == USER else None,
            log=tuple(play.log),
            to_move=play.to_move,
            num_errors_this_turn=play.num_errors_this_turn if seat == play.to_move else 0,
            options=self.options,
        )

    def outcome(self) -> Outcome:
        """The outcome, with the answer's grade in [0, 1] as score.

        `facts` holds the number of moves and words of each seat, and `grading.interactivity`.
        """
        log = self._play.log
        answers = [move.text for move in log if move.kind == ANSWER]
        wall = self.options.code_wall
        score = grade(self.instance, answers[0], code_wall=wall) if answers else 0.0
        facts = {"interactivity": interactivity(log)}
        for seat, name in ((USER, "user"), (ASSISTANT, "assistant")):
            moves = [move.text for move in log if move.seat == seat]
            facts[f"{name}_moves"] = float(len(moves))
            facts[f"{name}_words"] = float(sum(len(text.split()) for text in moves))
        over = self._play.to_move is None
        return Outcome(over, bool(answers), score, score, (score, score), facts)

    def state(self) -> dict[str, Any]:
        """Instance, options and play as plain JSON values."""
        return {
            "game": "collab",
            "instance": asdict(self.instance),
            "options": asdict(self.options),
            "play": asdict(self._play),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The game that `state()` described. Its prompts include the moves made so far."""
        if state.get("game") != "collab":
            raise ValueError(f'state["game"] must be "collab", got {state.get("game")!r}')
        game = cls(instance_from_dict(state["instance"]), CollabOptions(**state["options"]))
        play = dict(state["play"])
        play["log"] = [Move(**move) for move in play["log"]]
        play["num_errors"] = list(play["num_errors"])
        game._play = _Play(**play)
        game._num_opening = len(game._play.log)
        return game

    def _read(self, seat: int, text: str) -> Move:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text.

        A line that starts with a closing tag ends the game. The text after the tag is the move's
        content; the lines before it are reasoning and are dropped. Any other text is a message.
        """
        play = self._play
        if play.to_move is None:
            raise PlayerError("over", "the conversation is over")
        if seat != play.to_move:
            raise PlayerError("not_your_turn", "it is the other's turn")
        if self.options.private_reasoning:
            text = text.rpartition(_THINK_END)[2]
        closing = _CLOSING.search(text)
        if closing is not None:
            kind, content = closing[1].lower(), text[closing.end() :].strip()
            if _OWNER[kind] != seat:
                valid = END if seat == USER else ANSWER
                raise PlayerError("not_yours", f"only the other can [{kind}]; you can [{valid}]")
            if kind == ANSWER and not content:
                raise PlayerError("empty", "nothing after [answer]")
            return Move(seat, cast(Kind, kind), content)
        # Other games need a [message] tag. Here it is allowed and has no effect.
        split = split_move(text)
        content = split[1] if split is not None and split[0] == "message" else text.strip()
        if not content:
            raise PlayerError("empty", "you said nothing")
        return Move(seat, "message", content)


def _checked(seat: int) -> int:
    if seat not in (USER, ASSISTANT):
        raise ValueError(f"seat must be 0 or 1, got {seat}")
    return seat
