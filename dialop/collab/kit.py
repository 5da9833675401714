"""The kit of collab (`dialop.kit`). Generated instances are hidden-number tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dialop import people, rows
from dialop.collab import numbers, script, texts
from dialop.collab.game import CollabGame
from dialop.collab.grading import check_tasks
from dialop.collab.task import ANSWER, ASSISTANT, END, NAMES, USER, CollabInstance, CollabOptions
from dialop.forms import Form
from dialop.game import Prompt
from dialop.kit import check_options, option
from dialop.logged import part_of
from dialop.marks import read_mark
from dialop.values import parsed

TITLE = "collaborative simulation"
ROLES: tuple[str, ...] = NAMES
ANSWERS = False  # no proposals
POLICY_SEATS: tuple[int, ...] = (ASSISTANT,)
SCRIPT_NAMES: tuple[str, ...] = tuple(script.ScriptedCollab.OPTIONS)
BASELINES: tuple[str, ...] = ("ask", "guess")

make_script = script.make_scripted
restore = CollabGame.from_state

# The prompt with which a chat model rates a conversation, instead of `grading.interactivity`.
_RULES = """\
You mark how well an assistant worked together with a user who had not said all that was needed. \
You read what the user wanted and the whole conversation. Consider three things, each from 0 to 1:
- understanding: did the assistant grasp what the user wanted, and were its messages clear?
- questions: did it ask for what was missing, precisely and only where it was needed?
- help: did it offer something useful on the way, such as choices or a draft?
The mark is their mean. Whether the result is right does not count here. Answer with one sentence \
of reason and then, on a line of its own, JSON such as {"interactivity": 0.6}, and no other JSON."""


@dataclass(frozen=True, slots=True)
class Options(CollabOptions):
    """The numbers of the tasks, and the rules of play."""

    max_value: int = option(100, "all numbers are below this", low=2, high=10_000)

    def __post_init__(self) -> None:
        check_options(self)


def generate_instance(options: Options, *, seed: int, index: int) -> CollabInstance:
    """Hidden-number task `index` of the stream `seed`."""
    return numbers.hidden_number(seed=seed, index=index, max_value=options.max_value)


def new_game(instance: CollabInstance, options: Options) -> CollabGame:
    """A new conversation about this task."""
    return CollabGame(instance, part_of(options, CollabOptions))


def digest(instance: CollabInstance) -> str:
    """A digest of the task's visible text, independent of the file."""
    return people.digest(people.as_read(instance.goal))


def described(instances: Sequence[CollabInstance], options: Options) -> dict[str, Any]:
    """The number of instances of each kind of task."""
    return {"tasks": dict(Counter(instance.task for instance in instances))}


def phrases(
    instances: Sequence[CollabInstance], options: Options, *, split_lines: bool
) -> Sequence[str]:
    """Tags and sentences of the hidden-number task in the brief style; () in the full style.

    `split_lines` is ignored: no move of this game has several lines.
    """
    if not options.brief:
        return ()
    sentences = (script.ASK_NUMBER, script.SMALL_TALK)
    return [f"[{ANSWER}]", f"[{END}]", *sentences, *texts.EMPTY_REPLIES, *numbers.phrases()]


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


def forms(game: CollabGame, seat: int) -> list[Form]:
    """A message, and the assistant's answer or the user's end."""
    assists = seat == ASSISTANT
    end = ("Answer", "[answer] ") if assists else ("End", "[end] ")
    return [Form("Say", hint="Say something"), Form(*end, button=not assists)]


def talk(game: CollabGame, seat: int) -> list[tuple[int, str, str]]:
    """All moves: both seats know them."""
    return [(move.seat, move.kind, move.text) for move in game.view(seat).log]


def write(path: Path, instances: Sequence[CollabInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    rows.write_rows(path, [asdict(instance) for instance in instances])


def read(path: Path) -> list[CollabInstance]:
    """Read the instances of a .parquet or .jsonl file.

    Raises as `rows.read_instances`, and ValueError for a task that cannot be graded.
    """
    instances = rows.read_instances(path, _from_row)
    check_tasks((rows.location_of(path, i), instance) for i, instance in enumerate(instances))
    return instances


def _from_row(row: dict[str, Any]) -> CollabInstance:
    return parsed(CollabInstance, {name: value for name, value in row.items() if value is not None})


def judge_prompt(game: CollabGame) -> Prompt:
    """The rules of rating; the user's goal and the conversation."""
    view = game.view(USER)
    messages = [("user", view.request), *((NAMES[move.seat], move.text) for move in view.log)]
    conversation = "\n\n".join(f"{name}: {text}" for name, text in messages)
    return Prompt(
        _RULES, f"What the user wanted:\n{view.goal}\n\nThe conversation:\n{conversation}"
    )


def judged(game: CollabGame, answer: str) -> CollabGame | None:
    """A copy of the game with the rating of a judge's answer; None without a rating."""
    if (rating := read_mark(answer, "interactivity")) is None:
        return None
    twin = game.clone()
    twin.rating = rating
    return twin
