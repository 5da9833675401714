"""All text that a seat reads in a collaboration, except errors.

There are two styles: full, with a system prompt for each role, and brief, without one, for very
small models. A message is shown as written, except that lines that look like lines of the game are
indented.
"""

from __future__ import annotations

from collections.abc import Sequence

from dialop.collab.task import ASSISTANT, CollabInstance, Task
from dialop.logged import Move
from dialop.tags import indent_further, indent_lookalikes

_ASSISTANT = """\
You help a user with a task. The user's first message leaves out things that you need, and the \
user only tells them when asked. Ask short and precise questions, one message at a time, and do \
not guess what you could ask.

When you know enough, end the conversation with your result: write your reasoning first if you \
need any, then a line that starts with [answer], followed by {result} and nothing else. Only what \
follows [answer] counts, and you can answer once."""

_RESULTS: dict[Task, str] = {
    "math": "the final value",
    "writing": "the complete text",
    "code": "the complete Python code, imports included",
}

USER_RULES = """\
Play a person whom an assistant helps. It asks, and you tell what you know, one fact at a time, in \
one short sentence. Never work out a result yourself. If you are shown a draft, say what in it \
differs from what you know. When the talk leads nowhere, end it with a line that says only [end]."""

_USER_OPENING = "You have asked an assistant for help."

# With each message of the assistant, and without the request: a 0.5B model forgets its role and
# tries to answer any question that it reads (docs/notes/log.md).
_USER_TURN = """\
You know: {facts}

Question: {message}

Answer in one short sentence with what you know."""

DO_NOT_KNOW = "I don't know."
NOTHING_MORE = "That is all I know."
GO_ON = "Please go on."
EMPTY_REPLIES = (DO_NOT_KNOW, NOTHING_MORE, GO_ON)

# The first words of the game's own lines; its other lines start with a bracket.
_WORDS = ("user", "assistant", "you", "your", "error", "the conversation so far")


def assistant_rules(task: Task) -> str:
    """The assistant's system prompt."""
    return _ASSISTANT.format(result=_RESULTS[task])


def user_opening(instance: CollabInstance, *, brief: bool) -> str:
    """The user's first text. In the brief style it has the goal and the user's request."""
    return f"{instance.goal}\nYou: {instance.request}" if brief else _USER_OPENING


def user_turn(instance: CollabInstance, move: Move) -> str:
    """The simulated user's text about the assistant's message in the full style: the goal without
    the request (the whole goal if nothing remains) and the message."""
    facts = instance.goal.replace(instance.request, "").strip()
    return _USER_TURN.format(message=partner_text(move), facts=facts or instance.goal)


def partner_text(move: Move) -> str:
    """The other seat's text about a move."""
    if move.kind == "message":
        return indent_lookalikes(move.text, _WORDS)
    return f"[{move.kind}] {indent_further(move.text)}".rstrip()


def history(log: Sequence[Move], seat: int) -> str:
    """Moves made before the game was restored, as `seat` reads them. The lines of a message after
    the first are indented."""
    other = "User" if seat == ASSISTANT else "Assistant"
    return "\n".join(
        f"{'You' if move.seat == seat else other}: {indent_further(move.text)}" for move in log
    )
