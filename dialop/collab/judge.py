"""How a judge, a chat model, rates a conversation: what it reads, and how its answer is read.

Its rating in [0, 1] replaces that of `grading.interactivity` in the game's outcome.
"""

from __future__ import annotations

from dialop.collab.game import CollabGame
from dialop.collab.task import NAMES, USER
from dialop.game import Prompt
from dialop.marks import read_mark

_RULES = """\
You mark how well an assistant worked together with a user who had not said all that was needed. \
You read what the user wanted and the whole conversation. Consider three things, each from 0 to 1:
- understanding: did the assistant grasp what the user wanted, and were its messages clear?
- questions: did it ask for what was missing, precisely and only where it was needed?
- help: did it offer something useful on the way, such as choices or a draft?
The mark is their mean. Whether the result is right does not count here. Answer with one sentence \
of reason and then, on a line of its own, JSON such as {"interactivity": 0.6}, and no other JSON."""


def prompt(game: CollabGame) -> Prompt:
    """The rules of rating; the user's goal and the conversation."""
    view = game.view(USER)
    messages = [("user", view.request), *((NAMES[move.seat], move.text) for move in view.log)]
    conversation = "\n\n".join(f"{name}: {text}" for name, text in messages)
    return Prompt(
        _RULES, f"What the user wanted:\n{view.goal}\n\nThe conversation:\n{conversation}"
    )


def judged(game: CollabGame, answer: str) -> CollabGame | None:
    """A copy of the game with the rating of a judge's answer; None if it holds none."""
    rating = read_mark(answer, "interactivity")
    return None if rating is None else game.rated(rating)
