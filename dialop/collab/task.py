"""The records of a collaboration: instance, options, moves, a seat's view. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict

from dialop.kit import option
from dialop.logged import Move, View
from dialop.values import Text

Task = Literal["math", "writing", "code"]

TASKS: tuple[Task, ...] = ("math", "writing", "code")
USER, ASSISTANT = 0, 1
ANSWER, END = "answer", "end"  # tags that end a conversation: the assistant's and the user's
NAMES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class CollabInstance:
    """One task.

    `request` is the user's first message, which the assistant reads. `goal` is the full task, which
    only the user knows. `target` is the number of a math task, the reference text of a writing
    task, or the solution of a code task for human readers. Code is graded by `tests`, Python
    statements that raise an error if the code is wrong. If `entry_point` is set, they are a
    unittest module that tests the object with that name.
    """

    key: Text
    task: Task
    request: str
    goal: str
    target: str
    tests: str = ""
    entry_point: str = ""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name in ("request", "goal"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must not be empty in {self.key!r}")
        if self.task == "code" and not self.tests.strip():
            raise ValueError(f"a code task needs tests, but {self.key!r} has none")
        if self.task != "code" and not self.target.strip():
            raise ValueError(f"a {self.task} task needs a target, but {self.key!r} has none")


@dataclass(frozen=True, slots=True)
class CollabOptions:
    """The rules of a collaboration.

    `brief` omits the rules from the prompts, for small models. `private_reasoning` allows text up
    to `</think>`, which is hidden from the other seat. `accuracy` and `interactivity` weight the
    two parts of the reward.
    """

    brief: bool = option(False, "use short texts for small models", play=True)
    private_reasoning: bool = option(False, "allow private text up to </think>", play=True)
    accuracy: float = option(
        1.0, "weight of the answer's grade in the reward", low=0, high=1000, play=True
    )
    interactivity: float = option(
        0.0,
        "weight in the reward of how well the assistant drew out the goal, from 0 to 1",
        low=0,
        high=1000,
        play=True,
    )


@dataclass(frozen=True, slots=True)
class CollabView(View):
    """One seat's knowledge. `goal` is None for the assistant."""

    task: Task
    request: str
    goal: str | None
    log: tuple[Move, ...]

    def texts_of(self, seat: int) -> tuple[str, ...]:
        """The texts of a seat's moves, oldest first."""
        return tuple(move.text for move in self.log if move.seat == seat)
