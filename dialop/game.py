"""The interface of every game: seats, moves as text, observations as text, an outcome.

A game is built from an instance and played once. It can be cloned at any turn and restored from a
recorded state. Only the game decides who moves next, what each seat may see and each seat's reward.
The same five methods (`prompt`, `step`, `clone`, `view`, `outcome`) support:

- **Any number of seats**, with equal or unequal roles.
- **Rooms.** A seat that speaks in several rooms names the recipient in its text, as in
  "0: [message] hello". The game gives the text to the seats in that room, as their observations,
  and "" to the others.
- **Tools.** A tool call is a legal move that leaves `seat_to_move` unchanged. The tool's answer is
  an observation of the mover, which reads it before its next move and never trains on it. Every
  legal move counts towards a limit of moves, whether it passes the turn or not; invalid moves do
  not count.
- **Rewards**, shared or separate, of any sign, at the end (`Outcome.rewards`) and for single moves
  (`Step.rewards`).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

LARGEST = 1e15  # the largest reward, score or measure; its square fits float32
_ROUNDING = 1e-9  # tolerance of a score outside [0, 1]


class PlayerError(Exception):
    """An invalid move.

    `kind` is a short, stable word for counting. The seat that made the move reads the message.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class GameError(ValueError):
    """A game's code breaks a rule of `Game` or of its module. No move caused it, so the run ends
    with this line."""


class MachineError(GameError):
    """This machine lacks a program that a game needs."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The texts that a seat reads before its first move.

    `system` holds the rules and may be empty; `user` holds the seat's private view. `earlier` are
    finished games that demonstrate play, as pairs (text read, move); `between` is the text from
    their end to `user`.
    """

    system: str
    user: str
    earlier: tuple[tuple[str, str], ...] = ()
    between: str = ""

    def read(self, observation: str = "") -> tuple[list[str], list[str]]:
        """The texts that the seat has read up to its first move of this game, and its moves between
        them (one fewer). `observation` is what the seat has read in this game so far."""
        last = "\n".join(text for text in (self.between, self.user, observation) if text)
        return [*(read for read, _ in self.earlier), last], [move for _, move in self.earlier]


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one attempted move.

    `action` is the kind of a legal move, None for an invalid one. `error` is the text that the
    mover reads and `error_kind` the name for counting; both are None for a legal move.
    `observations[seat]` is the new text that the seat reads before its next move, "" for none. The
    mover's observation is a tool's answer or a confirmation.
    `rewards[seat]` is each seat's reward for this move, added to the outcome's rewards; () for
    none. An invalid move has none.
    """

    seat: int
    action: str | None
    error: str | None
    error_kind: str | None
    observations: tuple[str, ...]
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a game so far. In games that need an agreement, score, score_norm and rewards
    are 0 without one.

    `score` is in the game's own units. `score_norm` is its share of the best possible score, in
    [0, 1]. `rewards[seat]` is each seat's final reward; it may be negative, and the seats' rewards
    may differ. `facts` holds the instance's reference values for metrics, as floats (for matching:
    best, solo_0, solo_1). `proposal_norm` is what `score_norm` would be if the last proposal had
    been accepted, 0 if there was no proposal. `seat_scores[seat]` is each seat's own score in
    [0, 1] if they differ (in a zero-sum game 1 for a win, 0.5 for a draw, 0 for a loss); () means
    that all seats share `score_norm`.
    """

    over: bool
    agreed: bool
    score: float
    score_norm: float
    rewards: tuple[float, ...]
    facts: dict[str, float] = field(default_factory=dict)
    proposal_norm: float = 0.0
    seat_scores: tuple[float, ...] = ()

    def score_of(self, seats: Collection[int]) -> float:
        """The mean score of these seats, in [0, 1]; `score_norm` if shared or `seats` is empty."""
        if not self.seat_scores or not seats:
            return self.score_norm
        return sum(self.seat_scores[seat] for seat in seats) / len(seats)


def wrong_state(state: Any) -> str:
    """The problem with a game's state, as "must give …"; "" for none."""
    for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"must give plain JSON values, got {name}={value!r:.200} ({error})"
    return ""


def wrong_outcome(game: Game, outcome: Any) -> str:
    """The problem with an outcome of `game`, as "must give …"; "" for none."""
    if not isinstance(outcome, Outcome):
        return f"must give an Outcome, got {outcome!r}"
    for name in ("rewards", "seat_scores"):
        numbers = getattr(outcome, name)
        if name == "seat_scores" and numbers == ():
            continue
        if not all_usable(numbers) or len(numbers) != game.num_seats:
            rule = f"one number per seat, at most {LARGEST:g} in size"
            return f"must give {name} as a tuple of {rule}, got {numbers!r}"
    scores = (outcome.score_norm, *outcome.seat_scores)
    if not all_usable((outcome.score, outcome.proposal_norm, outcome.score_norm)):
        return f"must give finite numbers as scores, got {outcome}"
    if not (isinstance(outcome.facts, dict) and all_usable(tuple(outcome.facts.values()))):
        return f"must give a finite number for each of its facts, got {outcome.facts!r}"
    if not all(-_ROUNDING <= score <= 1 + _ROUNDING for score in scores):
        shown = ", ".join(f"{score:g}" for score in scores)
        rule = "must give score_norm and seat_scores in [0, 1]"
        return f"{rule}, got {shown}; rewards may be any numbers"
    if outcome.over != (game.seat_to_move is None):
        mover = "no seat is" if game.seat_to_move is None else f"seat {game.seat_to_move} is"
        by_play = not outcome.over and hasattr(game, "_to_move")  # a TurnGame
        why = " (`play` returned no seat, which ends the game)" if by_play else ""
        return f"must give over={not outcome.over} where {mover} to move{why}, got {outcome.over}"
    return ""


def wrong_measures(measures: Any) -> str:
    """The problem with the result of `Game.measures`, as "must give …"; "" for none."""
    if not (isinstance(measures, dict) and all_usable(tuple(measures.values()))):
        return f"must give a number for each name, got {measures!r}"
    for name in measures:
        if is_taken(name):
            return f"must not give the name of a metric of every run, got {name!r}"
    if len(measures.keys() & {"statements", "true_statements"}) == 1:
        return f"must give both of statements and true_statements, got {', '.join(measures)}"
    return ""


def wrong_step(game: Game, step: Any) -> str:
    """The problem with the result of `game.step()` or the seat that moves next; "" for none."""
    if not isinstance(step, Step) or (step.action is None) == (step.error is None):
        return f"must give a Step with an action or an error, got {step!r}"
    texts, num = step.observations, game.num_seats
    if not (isinstance(texts, tuple | list) and [type(text) for text in texts] == [str] * num):
        return f"observations must be one text per seat, got {texts!r}"
    if step.rewards and not (all_usable(step.rewards) and len(step.rewards) == num):
        return f"rewards must be one finite number per seat, got {step.rewards!r}"
    if game.seat_to_move is not None and game.seat_to_move not in range(num):
        return f"seat_to_move must be a seat or None, got {game.seat_to_move}"
    return ""


def is_taken(name: Any) -> bool:
    """Whether every run has a metric of this name, so that a game or a loss must use another."""
    return _EVERY_RUNS.fullmatch(str(name)) is not None


# `words` is missing on purpose: a game may count words by its own rule.
_EVERY_RUNS = re.compile(
    r"step|back_to|games|agreement|honesty|messages|optimal|turns|reward(_std|/.*)?|errors(_.*)?|eval_.*"
    r"|score(_if_agreed|_norm|/.*)?|entropy|lr|(critic_)?grad_norm|policy_loss|imitation_loss(_chats)?"
    r"|ratio_mean|clip_share|legal_entropy|(sync_check_)?mismatch(_max|_mean|_kl|_ess)?|importance_mean|kl_reference"
    r"|value_loss|value_clip_share|return_mean|explained_variance|void_share|branch_variance"
    r"|zero_variance_(groups|branches)|(play|credit|sleep|update|push|sync_check|eval|save|step|engine"
    r"|tokens_per)_s|num_(games|void|instances|groups|suspected|engine_restarts|continuation_tokens"
    r"|branch_(points|games|tokens)|(optimizer|skipped)_steps|(trained|prompt|generated)_tokens"
    r"|endpoint_(requests|retries|prompt_tokens|tokens))"
)


def all_usable(numbers: Any) -> bool:
    """Whether this is a tuple or a list of numbers, none of them NaN or beyond LARGEST."""
    return isinstance(numbers, tuple | list) and all(
        isinstance(number, Real) and abs(float(number)) <= LARGEST for number in numbers
    )


class Game(ABC):
    """One play of one instance.

    `step` never raises because of a player's text. It counts an invalid move as an error.
    """

    num_seats: int

    @property
    @abstractmethod
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""

    @property
    def answer_due(self) -> bool:
        """Whether the seat to move must answer a pending proposal."""
        return False

    def legal_moves(self) -> Sequence[str]:
        """The texts of all moves that the seat to move has; () if the game does not list them.

        With `deals` of the module they make exact values possible (`dialop.tree`).
        """
        return ()

    @abstractmethod
    def prompt(self, seat: int) -> Prompt:
        """The seat's opening texts. In a restored game, `user` includes the moves made so far."""

    @abstractmethod
    def step(self, seat: int, text: str) -> Step:
        """Try `text` as the seat's move. An invalid move changes only the error count.

        After a legal move `seat_to_move` may be the same seat.
        """

    @abstractmethod
    def clone(self) -> Game:
        """An independent copy at the current turn."""

    @abstractmethod
    def view(self, seat: int) -> Any:
        """The seat's knowledge, as data for scripted players and reports.

        It never exceeds what the seat's texts contain.
        """

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        """Counts of the moves that these seats made in this game, for metrics; {} for none.

        Logs and reports show each as its mean over games. `statements` and `true_statements` are
        shown as their quotient, `honesty`.
        """
        return {}

    def reach(self) -> list[tuple[float, ...]]:
        """The value that each seat can reach, before each legal move in play and now; [] if the
        game does not compute it.

        It is the normalized value of the plan that looks best given what the seat sees and the true
        statements that it has read. A seat that cannot propose has the proposer's value.
        """
        return []

    @abstractmethod
    def outcome(self) -> Outcome:
        """The outcome so far; final once `seat_to_move` is None."""

    def outcome_of_forfeit(self, seat: int) -> Outcome:
        """The outcome if `seat`, whose move it is, has used up its tries.

        If seats are paid differently, it must pay this seat what a loss pays; otherwise stalling
        pays more than losing. `over` is False.
        """
        return self.outcome()

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """A JSON-serialisable record from which the game's module restores this game exactly."""


class Instance(Protocol):
    """A game's private starting state. `key` is its unique name."""

    @property
    def key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Lesson:
    """A move to imitate.

    `detours` are ordered character ranges [start, end) that a learner reads but does not imitate.
    They are injected errors; the text after them shows how to recover from an error.
    """

    text: str
    detours: tuple[tuple[int, int], ...] = ()


class Script(Protocol):
    """A scripted player: a pure function of its seed and its seat's view.

    So it can be copied, forked and called again with the same result.
    """

    @property
    def seed(self) -> int: ...

    def act(self, view: Any) -> str:
        """The next move as text. `view` must belong to the seat to move."""
        ...

    def lesson(self, view: Any) -> Lesson:
        """The same move as an example to imitate."""
        ...

    def reseeded(self, seed: int) -> Script:
        """The same player with another seed."""
        ...
