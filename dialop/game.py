"""What every game is: seats, moves as text, observations as text, an outcome. Knows no tokens,
players or models.

A game is built from an instance, played once, cloned at any turn and restored from a recorded
state. Who sits where, who moves next, what each seat may see and what each seat earns is decided
here and nowhere else, so games with tools, private rooms or unequal roles fit the same five verbs:
`prompt`, `step`, `clone`, `view`, `outcome`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol


class PlayerError(Exception):
    """A move the rules refuse. `kind` is a short stable word for counting, the message is what the
    erring seat reads."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a seat reads before its first move: the rules (`system`, may be empty) and its private
    view (`user`)."""

    system: str
    user: str


@dataclass(frozen=True, slots=True)
class Step:
    """What one try at a move did.

    `action` is the legal move's kind (None when refused); `error` the text the mover reads and
    `error_kind` its counted name (both None when legal); `observations[seat]` the new text each
    seat reads before its next move ("" for nothing).
    """

    seat: int
    action: str | None
    error: str | None
    error_kind: str | None
    observations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a game stands or ended. Without an agreement score, score_norm and rewards are 0.

    `score` is in the game's own units, `score_norm` in [0, 1] of the best possible, `rewards[seat]`
    what each seat earns, `facts` the instance's reference points for metrics (for matching: best,
    solo_0, solo_1, all plain floats). `proposal_norm` is what score_norm would be had the last
    proposal been accepted, 0 where none was made.
    """

    over: bool
    agreed: bool
    score: float
    score_norm: float
    rewards: tuple[float, ...]
    facts: dict[str, float]
    proposal_norm: float = 0.0


class Game(ABC):
    """One play of one instance. `step` never raises for a player's text: an illegal move only
    counts an error."""

    num_seats: int

    @property
    @abstractmethod
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""

    @property
    def answer_due(self) -> bool:
        """Whether the seat to move must answer something that lies on the table."""
        return False

    @abstractmethod
    def prompt(self, seat: int) -> Prompt:
        """The seat's opening texts; a game restored in its middle renders the moves made so far
        into `user`."""

    @abstractmethod
    def step(self, seat: int, text: str) -> Step:
        """Try `text` as the seat's move. Refused moves change nothing but the error count."""

    @abstractmethod
    def clone(self) -> Game:
        """An independent copy at this very turn."""

    @abstractmethod
    def view(self, seat: int) -> Any:
        """What the seat may know, as data, for scripted players and reports; never more than its
        texts told it."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """The outcome so far; final once `seat_to_move` is None."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """A JSON-able record from which the game's module restores exactly this game."""


class Instance(Protocol):
    """A game's private starting state, whatever else it holds, has a name of its own."""

    @property
    def key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Lesson:
    """A move to imitate. `detours` are ranges [start, end) of its characters, in order, that a
    learner reads and does not imitate: the words after them show how to go on from there."""

    text: str
    detours: tuple[tuple[int, int], ...] = ()


class Script(Protocol):
    """A scripted player: a function of its own draws and its seat's view, so it can be copied,
    forked and asked again."""

    @property
    def seed(self) -> int: ...

    def act(self, view: Any) -> str:
        """The next move as text. The view must be of the seat to move."""
        ...

    def lesson(self, view: Any) -> Lesson:
        """The same move as a teacher shows it."""
        ...

    def reseeded(self, seed: int) -> Script:
        """The same player with other draws."""
        ...
