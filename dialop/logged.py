"""A base class for games with a log of moves, some of them made before play starts.

Matching, mediation, planning and collab share this code for turns, invalid moves, clones, states,
prompts of restored games, and the outcome of an agreement.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field

from dialop.game import Game, Outcome, PlayerError, Prompt, Step
from dialop.kit import option
from dialop.tags import drop_reasoning, split_move
from dialop.values import frozen, parsed, plain

T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    """The rules of play that these games share."""

    messages: bool = option(True, "allow messages between the seats", play=True)
    brief: bool = option(
        False, "use short texts for small models instead of the full rules", play=True
    )
    private_reasoning: bool = option(
        False,
        "allow private text before a move's tag, hidden from the other seats; the rules in the "
        "prompt do not mention it",
        play=True,
    )


@dataclass(frozen=True, slots=True)
class Move:
    """A legal move: its seat, its tag, and its content."""

    seat: int
    kind: Annotated[str, Field(pattern="^(message|tool|propose|accept|reject|answer|end)$")]
    text: str


@dataclass(frozen=True, slots=True)
class View:
    """The fields that the view of each seat has in all these games. `options` are the rules of
    play."""

    seat: int
    to_move: int | None
    num_errors_this_turn: int
    options: Any


def part_of(options: Any, kind: type[T]) -> T:
    """A `kind` (a dataclass of settings) with its fields copied from `options`."""
    return kind(**{each.name: getattr(options, each.name) for each in fields(kind)})  # type: ignore[arg-type]


class LoggedGame(Game):
    """One play of one instance; a subclass defines its rules.

    `kinds` are the tags of moves, `turn_error` is the error for a seat that moves out of turn,
    `past_heading` is the heading of the moves made before play starts. `played` names the other
    attributes that a move may change, besides `log` and the error counts: numbers, tuples, lists.
    """

    name: ClassVar[str]
    instance_type: ClassVar[type[Any]]
    move_type: ClassVar[type[Any]]
    kinds: ClassVar[tuple[str, ...]] = ("message", "propose", "accept", "reject")
    options_type: ClassVar[type[Any]] = Rules
    turn_error: ClassVar[str] = "it is not your turn"
    over_error: ClassVar[str] = "the game is over"
    past_heading: ClassVar[str] = "The game so far:"
    played: ClassVar[tuple[str, ...]] = ("to_move", "pending", "agreed")
    pending: Any = None
    agreed: Any = None

    def __init__(
        self, instance: Any, options: Any, *, first: int | None = None, opening: Sequence[Any] = ()
    ) -> None:
        self.instance, self.options, self.to_move = instance, options, first
        self.log: list[Any] = []
        self._num_errors, self._tried = [0] * self.num_seats, 0  # tried: errors in this turn
        self._plain: dict[str, str] = {}  # the instance as JSON, shared by all clones
        for move in opening:
            self._open(move)
        self._begin()

    def _begin(self) -> None:
        # The prompts include the moves before this index, which no `step` of this object returned.
        self._num_opening = len(self.log)
        self._first = self.seat_to_move

    @abstractmethod
    def _read(self, seat: int, text: str) -> Any:
        """Parse a seat's text as a legal move. Raises PlayerError for any other text."""

    @abstractmethod
    def _apply(self, move: Any) -> Sequence[str]:
        """Apply a legal move to the state of play; return each seat's text about it."""

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        return self.to_move

    def _open(self, move: Any) -> None:
        """Make one move of the opening.

        In recorded games people also wrote messages while a proposal was pending. The answer is
        still due after such a message.
        """
        answers = self.seat_to_move if self.answer_due else None
        self._make(move)
        if move.kind == "message" and answers is not None:
            self.to_move = answers

    def _make(self, move: Any) -> Sequence[str]:
        """Make a legal move; return each seat's text about it."""
        self.log.append(move)
        self._tried = 0
        return self._apply(move)

    @property
    def answer_due(self) -> bool:
        """Whether the seat to move must answer a pending proposal."""
        return self.pending is not None

    @property
    def moves(self) -> tuple[Any, ...]:
        """All legal moves so far, including moves made before play."""
        return tuple(self.log)

    @property
    def num_errors(self) -> tuple[int, ...]:
        """The number of invalid moves so far, by seat."""
        return tuple(self._num_errors)

    def step(self, seat: int, text: str) -> Step:
        """Try a move. An invalid one changes only the error count and is reported to the mover."""
        try:
            move = self._read(self._checked(seat), text)
        except PlayerError as error:
            self._num_errors[seat] += 1
            if seat == self.seat_to_move:
                self._tried += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("",) * self.num_seats)
        return Step(seat, move.kind, None, None, tuple(self._make(move)))

    def clone(self) -> Self:
        """An independent copy; the instance and the immutable moves are shared."""
        twin = copy.copy(self)
        lists = {n: [*value] for n, value in vars(self).items() if isinstance(value, list)}
        vars(twin).update(lists)
        return twin

    def state(self) -> dict[str, Any]:
        """Instance, options and play as plain JSON values."""
        if "instance" not in self._plain:
            self._plain["instance"] = json.dumps(asdict(self.instance))
        return {
            "game": self.name,
            "instance": json.loads(self._plain["instance"]),
            "options": asdict(self.options),
            "play": {
                "log": [plain(asdict(move)) for move in self.log],
                "num_errors": [*self._num_errors],
                "num_errors_this_turn": self._tried,
                **{name: plain(getattr(self, name)) for name in self.played},
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The game that `state()` describes. Its prompts include the moves made so far."""
        if state.get("game") != cls.name:
            raise ValueError(f'state["game"] must be "{cls.name}", got {state.get("game")!r}')
        instance, play = parsed(cls.instance_type, state["instance"]), state["play"]
        game = cls(instance, cls.options_type(**state["options"]))
        game.log = [cls.move_type(**frozen(move)) for move in play["log"]]
        game._num_errors, game._tried = [*play["num_errors"]], play["num_errors_this_turn"]
        for name in cls.played:
            is_list = isinstance(getattr(game, name), list)
            setattr(game, name, [*play[name]] if is_list else frozen(play[name]))
        game._begin()
        return game

    def _checked(self, seat: int) -> int:
        if seat not in range(self.num_seats):
            raise ValueError(f"seat must be 0 to {self.num_seats - 1}, got {seat}")
        return seat

    def _known(self, seat: int) -> dict[str, Any]:
        """The fields of `View` for this seat."""
        return {
            "seat": self._checked(seat),
            "to_move": self.seat_to_move,
            "num_errors_this_turn": self._tried if seat == self.seat_to_move else 0,
            "options": self.options,
        }

    def _prompt(
        self, seat: int, rules: str, own: str, past: str, *, says_turn: bool = False
    ) -> Prompt:
        """A prompt with the rules (full style), the seat's part and the moves before play.

        With `says_turn`, in the full style, the seat that moves first reads that it does so.
        """
        if self.options.brief:
            return Prompt("", f"{own}\n{past}" if past else own)
        user = f"{own}\n\n{self.past_heading}\n{past}" if past else own
        if says_turn and seat == self._first:
            user += "\n\nIt is your move." if past else "\n\nYou move first."
        return Prompt(rules, user)

    def _check_turn(self, seat: int) -> None:
        """Raise PlayerError unless the seat is to move."""
        if self.seat_to_move is None:
            raise PlayerError("over", self.over_error)
        if seat != self.seat_to_move:
            raise PlayerError("not_your_turn", self.turn_error)

    def _split(self, text: str, valid: str) -> tuple[str, str]:
        """The tag and the content of a move, without private reasoning; `valid` names the tags."""
        if self.options.private_reasoning:
            text = drop_reasoning(text, self.kinds)
        split = split_move(text)
        if split is None:
            raise PlayerError("no_tag", f"line 1 has no tag; start with {valid}")
        return split

    def _check_tag(self, tag: str, valid: str) -> None:
        if tag not in self.kinds:
            raise PlayerError("unknown_tag", f"unknown tag [{tag}]; use {valid}")

    def _answers(self, tag: str, valid: str, *, what: str = "proposal", none: str = "") -> bool:
        """Whether a tag answers a proposal. Raises PlayerError if an answer is due and this is not
        one, or the reverse. `what` names a pending proposal, `none` a missing one."""
        answers = tag in ("accept", "reject")
        if self.answer_due and not answers:
            raise PlayerError("must_answer", f"answer the {what} first: {valid}")
        if answers and not self.answer_due:
            raise PlayerError("nothing_pending", f"no {none or what} to {tag}; use {valid}")
        return answers

    def _check_messages(self, tag: str, valid: str) -> None:
        if tag == "message" and not self.options.messages:
            raise PlayerError("no_messages", f"messages are off; use {valid}")

    @property
    def _times(self) -> range:
        """The number of moves made before each legal move in play, and now."""
        return range(self._num_opening, len(self.log) + 1)

    def _outcome(self, value: Any, proposed: Sequence[Any], facts: dict[str, float]) -> Outcome:
        """The outcome of a game that needs an agreement: every seat's reward is `instance.norm` of
        the agreed proposal's value, 0 without an agreement. `proposed` are the proposals that could
        have been accepted."""
        inst, agreed = self.instance, self.agreed is not None
        score = float(value(self.agreed)) if agreed else 0.0
        norm = inst.norm(score) if agreed else 0.0
        return Outcome(
            over=self.seat_to_move is None,
            agreed=agreed,
            score=score,
            score_norm=norm,
            rewards=(norm,) * self.num_seats,
            facts=facts,
            proposal_norm=inst.norm(float(value(proposed[-1]))) if proposed else 0.0,
        )


def filled(content: str, tag: str) -> str:
    """The content of a move. Raises PlayerError if it is empty."""
    if not content:
        raise PlayerError("empty", f"nothing after [{tag}]")
    return content
