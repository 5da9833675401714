"""Scripted players of a collaboration: a user who answers questions, assistants who ask or guess.

Random draws are seeded by (seed, moves made).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dialop.collab import numbers
from dialop.collab.task import ANSWER, ASSISTANT, END, USER, CollabView
from dialop.collab.texts import DO_NOT_KNOW, GO_ON, NOTHING_MORE
from dialop.game import Lesson
from dialop.kit import option
from dialop.specs import ScriptedBase, made

USER_SCRIPT = "user"

ASK_NUMBER = "What number?"
ASK_MORE = "What else should I know?"
SMALL_TALK = "How are you?"
_GUESSES_BELOW = 10  # a guess assumes that the hidden number has one digit

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[DM][rs]\.)(?<!\bMrs\.)\s+|\n+")
_WORD = re.compile(r"[a-z][a-z']+|\d+")
# Words that say nothing about the subject of a question.
_EMPTY = frozenset(
    _WORD.findall(
        "about all also am an and any are as at be but by can could did do does for from give had "
        "has have how if in into is it its know like may me might must my need not of on one or "
        "our please say shall should so some tell that the their them then there these they this "
        "to us was we were what when where which who why will with would you your"
    )
)
_OPEN = frozenset(_WORD.findall("anything details else further information missing more specific"))


@dataclass(frozen=True, slots=True)
class ScriptedCollab(ScriptedBase):
    """One scripted player.

    For a user, `patience` is the number of messages after which it ends the conversation. For an
    assistant, `slip` is the probability of an injected error: an invalid, empty answer first.
    """

    OPTIONS: ClassVar = {
        USER_SCRIPT: ("patience",),
        **dict.fromkeys(("ask", "guess", "chat"), ("slip",)),
    }

    patience: int = option(8, low=1, high=1000)
    slip: float = option(0.0, low=0, high=1)

    @property
    def seat(self) -> int:
        """The seat of this player's role."""
        return USER if self.name == USER_SCRIPT else ASSISTANT

    def lesson(self, view: CollabView) -> Lesson:
        """The next move as an example to imitate. `view` must belong to this player's seat."""
        self.check_turn(view)
        if self.seat == USER:
            return Lesson(_act_user(self, view))
        again = " again" * view.num_errors_this_turn  # an injected error must not decide the repair
        draw = random.Random(f"{self.seed} {len(view.log)}{again}")
        if self.slip and not view.num_errors_this_turn and draw.random() < self.slip:
            return Lesson(f"[{ANSWER}]")
        return Lesson(_act_assistant(self, view, draw))


make_scripted = partial(made, ScriptedCollab)


def sentences(text: str) -> list[str]:
    """A text's sentences and lines, in order."""
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def content_words(text: str) -> set[str]:
    """The words of a text except function words, in lower case and without a final s."""
    words = set(_WORD.findall(text.lower())) - _EMPTY
    return {word.removesuffix("s") if len(word) > 3 else word for word in words}


def untold(view: CollabView) -> list[str]:
    """The goal's sentences that are not yet in the request or in the user's messages."""
    known = "\n".join((view.request, *view.texts_of(USER)))
    return [sentence for sentence in sentences(view.goal or "") if sentence not in known]


def _act_user(player: ScriptedCollab, view: CollabView) -> str:
    """Answer the assistant's last message with one fact of the goal.

    It is the fact that shares the most words with the question, or the next fact for an open
    question.
    """
    if len(view.texts_of(USER)) >= player.patience:
        return f"[{END}]"
    question = (view.texts_of(ASSISTANT) or ("",))[-1]
    if "?" not in question:
        return GO_ON
    facts, words = untold(view), content_words(question)
    if not facts:
        return NOTHING_MORE
    best = max(facts, key=lambda fact: len(words & content_words(fact)))
    if words & content_words(best):
        return best
    if words & _OPEN:
        return facts[0]
    return DO_NOT_KNOW


def _act_assistant(player: ScriptedCollab, view: CollabView, draw: random.Random) -> str:
    """Ask until the user has no more information ("ask"), make small talk once ("chat"), or answer
    at once ("guess"). Answer as soon as the texts determine the answer."""
    replies = view.texts_of(USER)
    solved = numbers.solve(view.request, "\n".join(replies))
    if solved is not None:
        return f"[{ANSWER}] {solved}"
    by = numbers.change(view.request)
    if player.name == "ask" and NOTHING_MORE not in replies:
        return ASK_NUMBER if by is not None else ASK_MORE
    if player.name == "chat" and not replies:
        return SMALL_TALK
    if by is not None:
        return f"[{ANSWER}] {draw.randrange(_GUESSES_BELOW) + by}"
    return f"[{ANSWER}] " + "\n".join(
        text for text in (view.request, *replies) if text != NOTHING_MORE
    )
