"""The collab game as `dialop.kit` describes a game: for `python -m dialop check` and bridges.

The instances are hidden-number tasks. The trainer reads the same rules from its section `game`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dialop.collab import numbers, script
from dialop.collab.game import CollabGame
from dialop.collab.store import read_instances as read
from dialop.collab.store import write_instances as write
from dialop.collab.task import ASSISTANT, NAMES, USER, CollabInstance, CollabOptions
from dialop.kit import check_options, option

__all__ = ["make_script", "read", "restore", "write"]

ROLES: tuple[str, ...] = NAMES
POLICY_SEATS: tuple[int, ...] = (ASSISTANT,)
SCRIPT_NAMES: tuple[str, ...] = script.NAMES
BASELINES: tuple[str, ...] = ("ask", "guess")


make_script = script.make_scripted
restore = CollabGame.from_state


@dataclass(frozen=True, slots=True)
class Options:
    """The numbers of the tasks, and the rules of play."""

    max_value: int = option(100, "all numbers are below this", low=2, high=10_000)
    brief: bool = False
    private_reasoning: bool = False

    def __post_init__(self) -> None:
        check_options(self)


def generate(options: Options, *, seed: int, start: int, num: int) -> list[CollabInstance]:
    """Hidden-number tasks start..start+num-1 of the stream `seed`."""
    return [
        numbers.hidden_number(seed=seed, index=start + i, max_value=options.max_value)
        for i in range(num)
    ]


def new_game(instance: CollabInstance, options: Options) -> CollabGame:
    """A new conversation about a task."""
    rules = CollabOptions(brief=options.brief, private_reasoning=options.private_reasoning)
    return CollabGame(instance, rules)


def seated(spec: str) -> tuple[str, str]:
    """The specs (user, assistant) of a scripted pair; `spec` is one of the two."""
    if script.make_scripted(spec, seed=0).seat == USER:
        return spec, "ask"
    return script.USER_SCRIPT, spec


def vary(instance: CollabInstance, seat: int, *, seed: int) -> CollabInstance | None:
    """The task with another goal, which only the user knows; None for the assistant's seat."""
    if seat == ASSISTANT:
        return None
    fact = numbers.HIDDEN.format(10_000 + seed)
    target = numbers.solve(instance.request, fact)
    return replace(instance, goal=f"{instance.request} {fact}", target=str(target))
