"""The rules of a collaboration: plain messages by turns, the assistant's `[answer]` or the user's
`[end]` ends it, the answer is graded.

The request has been made before the first move, so the assistant (seat 1) begins; the user (seat 0)
knows the goal. Both earn the grade in [0, 1], 0 without an answer. Knows no tokens or turn limits.
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
    Said,
    instance_from_dict,
)
from dialop.game import Game, Outcome, PlayerError, Prompt, Step
from dialop.tags import split_move

_CLOSING = re.compile(rf"^[ \t]*\[[ \t]*({ANSWER}|{END})[ \t]*\]", re.IGNORECASE | re.MULTILINE)
_OWNER = {ANSWER: ASSISTANT, END: USER}
_THINK_END = "</think>"


@dataclass(slots=True)
class _Play:
    """What changes while a game is played."""

    log: list[Said] = field(default_factory=list)
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
        self._num_opening = 0  # moves made before this object existed: the prompts tell them

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        return self._play.to_move

    def prompt(self, seat: int) -> Prompt:
        """The user's: its role and the goal; the assistant's: its role and the request."""
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
        """Try a move; a refused one is told to the mover alone and changes nothing but the error
        count."""
        play = self._play
        try:
            said = self._read(_checked(seat), text)
        except PlayerError as error:
            play.num_errors[seat] += 1
            if seat == play.to_move:
                play.num_errors_this_turn += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("", ""))
        play.log.append(said)
        play.num_errors_this_turn = 0
        play.to_move = 1 - seat if said.kind == "message" else None
        heard = texts.heard(said)
        return Step(seat, said.kind, None, None, ("", heard) if seat == USER else (heard, ""))

    def clone(self) -> Self:
        """An independent copy; the instance and what was said are shared."""
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
        """The answer's grade in [0, 1]; `facts` count the messages and words of either seat, and
        mark by rubric how well the assistant drew the goal out."""
        log = self._play.log
        answers = [said.text for said in log if said.kind == ANSWER]
        wall = self.options.code_wall
        score = grade(self.instance, answers[0], code_wall=wall) if answers else 0.0
        facts = {"interactivity": interactivity(log)}
        for seat, name in ((USER, "user"), (ASSISTANT, "assistant")):
            own = [said.text for said in log if said.seat == seat]
            facts[f"{name}_moves"] = float(len(own))
            facts[f"{name}_words"] = float(sum(len(text.split()) for text in own))
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
        """The game that `state()` described; its past moves enter its prompts."""
        if state.get("game") != "collab":
            raise ValueError(f'state["game"] must be "collab", got {state.get("game")!r}')
        game = cls(instance_from_dict(state["instance"]), CollabOptions(**state["options"]))
        play = dict(state["play"])
        play["log"] = [Said(said["seat"], said["kind"], said["text"]) for said in play["log"]]
        play["num_errors"] = list(play["num_errors"])
        game._play = _Play(**play)
        game._num_opening = len(game._play.log)
        return game

    def _read(self, seat: int, text: str) -> Said:
        """The legal move that a seat's text stands for; raises PlayerError.

        A line that starts with a closing tag ends the game with all that follows it; the lines
        before it are thinking aloud and are not kept. Any other text is a message.
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
                mine = END if seat == USER else ANSWER
                raise PlayerError("not_yours", f"only the other can [{kind}]; you can [{mine}]")
            if kind == ANSWER and not content:
                raise PlayerError("empty", "nothing after [answer]")
            return Said(seat, cast(Kind, kind), content)
        # The tag of the other games' messages is welcome and means nothing here.
        split = split_move(text)
        content = split[1] if split is not None and split[0] == "message" else text.strip()
        if not content:
            raise PlayerError("empty", "you said nothing")
        return Said(seat, "message", content)


def _checked(seat: int) -> int:
    if seat not in (USER, ASSISTANT):
        raise ValueError(f"seat must be 0 or 1, got {seat}")
    return seat
