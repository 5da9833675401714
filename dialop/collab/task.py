"""What a collaboration is made of: instance, options, what was said, a seat's view. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Literal

Task = Literal["math", "writing", "code"]
Kind = Literal["message", "answer", "end"]

TASKS: tuple[Task, ...] = ("math", "writing", "code")
USER, ASSISTANT = 0, 1
_MAX_SHOWN = 200  # characters of names that an error quotes
ANSWER, END = "answer", "end"  # the tags that end a conversation, each of one seat
NAMES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class CollabInstance:
    """One task: what the user asks for at first, and all that is wanted.

    `request` is the assistant's first text, `goal` what the user alone knows, `target` what an
    answer is held against: the number (math), a text to come close to (writing), a solution for
    readers (code, whose `tests` are Python that fails by an exception; where `entry_point` names
    something, they are a unittest module about it).
    """

    key: str
    task: Task
    request: str
    goal: str
    target: str
    tests: str = ""
    entry_point: str = ""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {short(self.task)}")
        if not self.key.isprintable():
            raise ValueError(f"key must be printable text on one line, got {short(self.key)}")
        for name in ("key", "request", "goal"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must not be empty in {self.key!r}")
        if self.task == "code" and not self.tests.strip():
            raise ValueError(f"a code task needs tests, {self.key!r} has none")
        if self.task != "code" and not self.target.strip():
            raise ValueError(f"a {self.task} task needs a target, {self.key!r} has none")


@dataclass(frozen=True, slots=True)
class CollabOptions:
    """How a collaboration is shown. `brief`: no rules, for small models; `private_reasoning`: text
    up to `</think>` is allowed and hidden from the other seat. `code_wall`: what code answers are
    graded behind (`sandbox.CHOICES`)."""

    brief: bool = False
    private_reasoning: bool = False
    code_wall: str = "auto"


@dataclass(frozen=True, slots=True)
class Said:
    """One legal move."""

    seat: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class CollabView:
    """What a seat knows; `goal` is None for the assistant."""

    seat: int
    task: Task
    request: str
    goal: str | None
    log: tuple[Said, ...]
    to_move: int | None
    num_errors_this_turn: int
    options: CollabOptions

    def said_by(self, seat: int) -> tuple[str, ...]:
        """The texts of a seat's moves, oldest first."""
        return tuple(said.text for said in self.log if said.seat == seat)


def instance_from_dict(data: dict[str, Any]) -> CollabInstance:
    """An instance from plain values. Raises ValueError for one that is none."""
    unknown = set(data) - set(FIELDS)
    if unknown:
        shown = ", ".join(sorted(repr(name) for name in unknown))
        raise ValueError(f"no field of an instance: {shown[:_MAX_SHOWN]}")
    missing = [name for name in FIELDS[:5] if data.get(name) is None]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    for name, value in data.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return CollabInstance(**data)


FIELDS: Sequence[str] = ("key", "task", "request", "goal", "target", "tests", "entry_point")
