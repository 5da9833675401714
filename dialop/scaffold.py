"""A game to start from: each player sees a number, and one of them names the sum to end the game.

`python -m dialop check FILE` checks it; dialop/kit.py lists what else a module may define.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from dialop.game import Outcome, PlayerError
from dialop.kit import option
from dialop.turns import TurnGame, TurnView

ROLES = ("player", "player")  # one for each seat


@dataclass(frozen=True)
class Options:
    """The settings of the game, set as game.options.largest=5."""

    largest: int = option(9, "the largest number", low=1, high=99)


@dataclass(frozen=True)
class Instance:
    """The hidden starting state. The key is unique."""

    key: str
    numbers: tuple[int, ...]


class MyGame(TurnGame):
    """The rules. `self.log` has the legal moves; `play` sets the other attributes."""

    num_seats, instance_type, options_type = 2, Instance, Options
    tags = ("message", "answer")
    rules = "Each of you sees a number. Write [message] WORDS to talk, or [answer] SUM to end."
    answer = ""

    def sees(self, seat: int) -> str:
        """The text that only this seat reads."""
        return f"your number: {self.instance.numbers[seat]}"

    def play(self, seat: int, tag: str, content: str) -> int | None:
        """The seat that moves next, None for the end."""
        if tag == "answer" and not content.isdecimal():
            raise PlayerError("no_number", "write digits after [answer]")
        self.answer = content if tag == "answer" else ""
        return None if self.answer else 1 - seat

    def outcome(self) -> Outcome:
        """Both get 1 for the right sum, else 0."""
        over, score = bool(self.answer), float(self.answer == str(sum(self.instance.numbers)))
        return Outcome(
            over=over, agreed=over, score=score, score_norm=score, rewards=(score, score)
        )


def generate_instance(options: Options, *, seed: int, index: int) -> Instance:
    """Instance `index` of the stream `seed`."""
    draw = random.Random(f"{seed} {index}")
    return Instance(f"{seed}-{index}", tuple(draw.randint(0, options.largest) for _ in ROLES))


def vary(instance: Instance, seat: int, *, seed: int) -> Instance:
    """Another instance that differs only in what this seat sees, for the check `views`."""
    numbers = list(instance.numbers)
    numbers[seat] = abs(numbers[seat] - 1)
    return replace(instance, numbers=tuple(numbers))


def tell(view: TurnView, draw: random.Random) -> str:
    """Say the own number, then answer with its sum with the last number heard."""
    own = view.own.split()[-1]
    heard = re.search(r"\d{1,3}", view.log[-1][2]) if view.log else None
    return f"[answer] {int(own) + int(heard[0])}" if heard else f"[message] {own}"


def guess(view: TurnView, draw: random.Random) -> str:
    """Answer without any message."""
    return f"[answer] {int(view.own.split()[-1]) + draw.randint(0, 9)}"


SCRIPTS = {"tell": tell, "guess": guess}  # for the warm start, the checks and evaluations
new_game, restore = MyGame, MyGame.from_state
