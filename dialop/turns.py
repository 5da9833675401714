"""A base class for games in which each legal move is one `[tag] content`, and its scripted players.

It handles turns, invalid moves, clones and states, so that a subclass contains only rules. The
state is the instance, the options and the texts of the legal moves, which are replayed to restore
it. When a seat reads another seat's move, all lines but the first are indented, so that no line of
a message can be mistaken for a line of the game.
"""

from __future__ import annotations

import copy
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from dialop.game import Game, GameError, Lesson, PlayerError, Prompt, Step
from dialop.tags import indent_further, split_move
from dialop.values import frozen, plain


@dataclass(frozen=True, slots=True)
class TurnView:
    """A seat's knowledge: its part of the instance and the moves so far, (seat, tag, content).

    `seat_to_move` is None at the end.
    """

    seat: int
    own: str
    log: tuple[tuple[int, str, str], ...]
    seat_to_move: int | None


class TurnGame(Game):
    """A game of moves that all seats read.

    A subclass sets `num_seats`, `tags`, `rules` and the types of its instance and options, and
    defines `sees`, `play` and `outcome`. A move whose tag is in `bare` needs no content. `play` may
    only change plain attributes that `begin` sets. Error kinds: over, not_your_turn, no_tag, empty,
    and the kinds that `play` raises.
    """

    tags: ClassVar[tuple[str, ...]]
    bare: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[str] = ""
    instance_type: ClassVar[type[Any]]
    options_type: ClassVar[type[Any]]

    def __init__(self, instance: Any, options: Any) -> None:
        self.instance, self.options = instance, options
        self.log: list[tuple[int, str, str]] = []
        self._texts: list[tuple[int, str]] = []
        self._to_move: int | None = 0
        self._shown: dict[int, str] = {}
        self._read: list[list[str]] = [[] for _ in range(self.num_seats)]
        self._opening: list[list[str]] = [[] for _ in range(self.num_seats)]
        self._num_errors = [0] * self.num_seats
        self.begin()

    def begin(self) -> None:
        """Set the game's own attributes; `self.instance` and `self.options` are already set."""

    @abstractmethod
    def sees(self, seat: int) -> str:
        """The text that only this seat reads, before its first move."""

    @abstractmethod
    def play(self, seat: int, tag: str, content: str) -> int | None:
        """Make a move, and return the seat that moves next, None at the end.

        All other seats read the move, unless `show` gives them another text. Raises PlayerError for
        an invalid move, before any change.
        """

    def show(self, seat: int, text: str) -> None:
        """Let a seat read this text instead of the move, e.g. a tool's answer."""
        if seat not in range(self.num_seats) or not isinstance(text, str):
            rule = f"show must be given a seat, 0 to {self.num_seats - 1}, and a text"
            raise GameError(f"{type(self).__name__}.{rule}, got {seat!r} and {text!r}")
        self._shown[seat] = text

    @property
    def seat_to_move(self) -> int | None:
        """The seat whose move it is, None when the game is over."""
        return self._to_move

    def prompt(self, seat: int) -> Prompt:
        """The rules; the seat's part and, in a restored game, what the seat has read so far."""
        return Prompt(self.rules, "\n".join([self._own(seat), *self._opening[seat]]))

    def _own(self, seat: int) -> str:
        own = self.sees(seat)
        if not isinstance(own, str):
            raise GameError(f"{type(self).__name__}.sees must return a text, got {own!r}")
        return own

    def step(self, seat: int, text: str) -> Step:
        """Try a move. An invalid one changes only the error count."""
        try:
            tag, content = self._parsed(seat, text)
            self._shown = {}
            mover = self.play(seat, tag, content)
        except PlayerError as error:
            self._num_errors[seat] += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("",) * self.num_seats)
        if mover is not None and mover not in range(self.num_seats):
            name, last = type(self).__name__, self.num_seats - 1
            raise GameError(f"{name}.play must return a seat, 0 to {last}, or None, got {mover!r}")
        self._to_move = mover
        self.log.append((seat, tag, content))
        self._texts.append((seat, text))
        move = f"seat {seat}: [{tag}] {indent_further(content)}".rstrip()
        shown = self._shown or {each: move for each in range(self.num_seats) if each != seat}
        for each, words in shown.items():
            self._read[each].append(words)
        observations = tuple(shown.get(each, "") for each in range(self.num_seats))
        return Step(seat, tag, None, None, observations)

    def _parsed(self, seat: int, text: str) -> tuple[str, str]:
        if self._to_move is None:
            raise PlayerError("over", "the game is over")
        if seat != self._to_move:
            raise PlayerError("not_your_turn", "it is not your turn")
        tag, content = split_move(text) or ("", "")
        if tag not in self.tags:
            valid = " or ".join(f"[{each}]" for each in self.tags)
            raise PlayerError("no_tag", f"start with {valid}")
        if not content and tag not in self.bare:
            raise PlayerError("empty", f"nothing after [{tag}]")
        return tag, content

    def clone(self) -> Self:
        """An independent copy; instance and options, which never change, are shared."""
        return copy.deepcopy(self, {id(each): each for each in (self.instance, self.options)})

    def view(self, seat: int) -> TurnView:
        """The seat's part of the instance and all moves."""
        return TurnView(seat, self._own(seat), tuple(self.log), self._to_move)

    def state(self) -> dict[str, Any]:
        """Instance, options, texts of the legal moves and error counts as plain JSON values."""
        return {
            "instance": plain(asdict(self.instance)),
            "options": plain(asdict(self.options)),
            "moves": plain(self._texts),
            "num_errors": list(self._num_errors),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The game that `state()` describes; raises ValueError for an invalid move."""
        instance = cls.instance_type(**frozen(state["instance"]))
        game = cls(instance, cls.options_type(**frozen(state["options"])))
        for seat, text in state["moves"]:
            step = game.step(seat, text)
            if step.error is not None:
                raise ValueError(f"the state has an invalid move: {step.error}")
        game._num_errors = list(state["num_errors"])
        game._opening = [list(texts) for texts in game._read]
        return game


@dataclass(frozen=True, slots=True)
class FunctionScript:
    """A scripted player that is a function of a view and a random number generator.

    The generator is seeded with the player's seed and the view.
    """

    move: Callable[[Any, random.Random], str]
    seed: int

    def act(self, view: Any) -> str:
        """The next move as text."""
        text = self.move(view, random.Random(f"{self.seed} {view!r}"))
        if not isinstance(text, str):
            name = getattr(self.move, "__name__", "a script")
            raise GameError(f"the scripted player {name} must return a text, got {text!r}")
        return text

    def lesson(self, view: Any) -> Lesson:
        """The same move as an example to imitate."""
        return Lesson(self.act(view))

    def reseeded(self, seed: int) -> FunctionScript:
        """The same player with another seed."""
        return FunctionScript(self.move, seed)
