"""A small game with everything that a game may have: three seats of two roles, two private rooms, a
tool, rewards of single moves, unequal final rewards. `game.name: tests.helpers.three_rooms`.

Each of two callers holds a number that its clerk does not know. A caller tells it to the clerk
(`[message] 3`). The clerk writes to one caller ("0: [message] ..."), may add numbers with a tool
(`[tool] 3 4`) and ends the game with `[answer] 7`. A right answer gives the clerk 1 and the callers
0.5; a wrong one gives the clerk -1. Each use of the tool costs the clerk 0.25.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dialop.game import Game, Lesson, Outcome, PlayerError, Prompt, Step
from dialop.kit import option
from dialop.tags import split_move

ROLES = ("caller", "caller", "clerk")
CLERK = 2
SCRIPT_NAMES = ("caller", "clerk", "calculator", "guesser")
BASELINES = ("clerk", "guesser")


@dataclass(frozen=True)
class Options:
    max_value: int = option(3, "numbers are below this", low=2, high=9)
    cost: float = 0.25
    brief: bool = False


@dataclass(frozen=True)
class Instance:
    key: str
    numbers: tuple[int, int]


@dataclass
class Play:
    told: dict[int, str] = field(default_factory=dict)
    to_move: int | None = 0
    answer: str | None = None
    log: list[tuple[int, str, str]] = field(default_factory=list)
    num_errors: list[int] = field(default_factory=lambda: [0, 0, 0])


@dataclass(frozen=True)
class View:
    seat: int
    number: int | None
    told: tuple[str, ...]
    answers: tuple[str, ...]


class ThreeRooms(Game):
    num_seats = 3

    def __init__(self, instance: Instance, options: Options) -> None:
        self.instance, self.options, self.play = instance, options, Play()

    @property
    def seat_to_move(self) -> int | None:
        return self.play.to_move

    def prompt(self, seat: int) -> Prompt:
        own = "clerk" if seat == CLERK else f"number {self.instance.numbers[seat]}"
        read = [text for _, _, text in self.play.log if text and seat == CLERK]
        return Prompt("" if self.options.brief else "Find the sum.", "\n".join([own, *read]))

    def step(self, seat: int, text: str) -> Step:
        play = self.play
        try:
            kind, content = self._read(seat, text)
        except PlayerError as error:
            play.num_errors[seat] += 1
            return Step(seat, None, f"Error: {error}", error.kind, ("", "", ""))
        observations, rewards = ["", "", ""], ()
        play.log.append((seat, kind, content))
        if kind == "tool":
            observations[CLERK] = str(sum(map(int, content.split())))
            rewards = (0.0, 0.0, -self.options.cost)
        elif kind == "answer":
            play.answer, play.to_move = content, None
        elif seat == CLERK:
            to = int(text.partition(":")[0])
            observations[to], play.to_move = f"clerk: {content}", to
        else:
            play.told[seat] = content
            observations[CLERK] = f"caller {seat}: {content}"
            play.to_move = next((s for s in (0, 1) if s not in play.told), CLERK)
            if play.to_move == 1:
                observations[1] = "your turn"
        return Step(seat, kind, None, None, tuple(observations), rewards)

    def _read(self, seat: int, text: str) -> tuple[str, str]:
        if self.play.to_move is None:
            raise PlayerError("over", "the game is over")
        if seat != self.play.to_move:
            raise PlayerError("not_your_turn", "not your turn")
        room, colon, rest = text.partition(":")
        if seat == CLERK and colon and room in ("0", "1"):
            text = rest
        kind, content = split_move(text) or ("", "")
        if kind not in (("tool", "answer", "message") if seat == CLERK else ("message",)):
            raise PlayerError("unknown_tag", "no such move")
        if seat == CLERK and kind == "message" and room not in ("0", "1"):
            raise PlayerError("no_room", "say to whom")
        short = all(len(number) < 4 for number in content.split(" "))
        if not content.replace(" ", "").isdigit() or not content.isascii() or not short:
            raise PlayerError("no_number", "numbers only")
        return kind, content

    def clone(self) -> ThreeRooms:
        twin = copy.copy(self)
        twin.play = copy.deepcopy(self.play)
        return twin

    def view(self, seat: int) -> View:
        number = None if seat == CLERK else self.instance.numbers[seat]
        told = tuple(self.play.told.get(s, "") for s in (0, 1)) if seat == CLERK else ()
        calls = [text for _, kind, text in self.play.log if kind == "tool" and seat == CLERK]
        return View(seat, number, told, tuple(str(sum(map(int, text.split()))) for text in calls))

    def measures(self, seats: Collection[int]) -> dict[str, float]:
        calls = [kind for seat, kind, _ in self.play.log if seat in seats and kind == "tool"]
        return {"tool_calls": float(len(calls))}

    def outcome(self) -> Outcome:
        answer = self.play.answer
        right = answer is not None and answer == str(sum(self.instance.numbers))
        rewards = (0.0, 0.0, 0.0)
        if answer is not None:
            rewards = (0.5, 0.5, 1.0) if right else (0.0, 0.0, -1.0)
        score = float(right)
        over = answer is not None
        return Outcome(
            over=over,
            agreed=over,
            score=score,
            score_norm=score,
            rewards=rewards,
            facts={"sum": float(sum(self.instance.numbers))},
        )

    def state(self) -> dict[str, Any]:
        play = asdict(self.play)
        play["told"] = {str(seat): text for seat, text in self.play.told.items()}
        play["log"] = [list(entry) for entry in self.play.log]
        instance = {"key": self.instance.key, "numbers": list(self.instance.numbers)}
        return {"instance": instance, "options": asdict(self.options), "play": play}


def generate_instance(options: Options, *, seed: int, index: int) -> Instance:
    draw = random.Random(f"{seed} {index}")
    numbers = draw.randrange(options.max_value), draw.randrange(options.max_value)
    return Instance(f"three-{seed}-{index}", numbers)


def vary(instance: Instance, seat: int, *, seed: int) -> Instance | None:
    if seat == CLERK:
        return None
    numbers = [*instance.numbers]
    numbers[seat] += seed
    return Instance(instance.key, (numbers[0], numbers[1]))


def new_game(instance: Instance, options: Options) -> ThreeRooms:
    return ThreeRooms(instance, options)


def restore(state: Mapping[str, Any]) -> ThreeRooms:
    inst = state["instance"]
    game = ThreeRooms(Instance(inst["key"], tuple(inst["numbers"])), Options(**state["options"]))
    play = dict(state["play"])
    play["told"] = {int(seat): text for seat, text in play["told"].items()}
    play["log"] = [tuple(entry) for entry in play["log"]]
    play["num_errors"] = list(play["num_errors"])
    game.play = Play(**play)
    return game


@dataclass(frozen=True)
class Player:
    name: str
    seed: int

    def act(self, view: View) -> str:
        if view.seat != CLERK:
            return f"[message] {view.number}"
        if self.name == "guesser":
            return "[answer] 0"
        if self.name == "calculator":
            told = " ".join(view.told)
            return f"[answer] {view.answers[0]}" if view.answers else f"[tool] {told}"
        return f"[answer] {sum(map(int, view.told))}"

    def lesson(self, view: View) -> Lesson:
        return Lesson(self.act(view))

    def reseeded(self, seed: int) -> Player:
        return Player(self.name, seed)


def make_script(spec: str, *, seed: int) -> Player:
    if spec not in SCRIPT_NAMES:
        raise ValueError(f"unknown scripted player {spec!r}: choose one of {SCRIPT_NAMES}")
    return Player(spec, seed)


def seated(spec: str) -> tuple[str, str, str]:
    return ("caller", "caller", "clerk" if spec == "caller" else spec)


def phrases(instances: list[Instance], options: Options, *, split_lines: bool) -> list[str]:
    return ["[message]", "[answer]", "[tool]", "number", "caller", "clerk", "your turn"]
