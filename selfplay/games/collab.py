"""The kit of the collab game: generated hidden-number tasks, or tasks from files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dialop.collab import kit, numbers, sandbox, script, store, texts
from dialop.collab.game import CollabGame
from dialop.collab.task import ANSWER, END, NAMES, CollabInstance, CollabOptions
from dialop.game import Script
from selfplay.config import GameConfig

ROLES: tuple[str, ...] = NAMES
POLICY_SEATS: tuple[int, ...] = kit.POLICY_SEATS
SCRIPT_NAMES: tuple[str, ...] = kit.SCRIPT_NAMES
BASELINES: tuple[str, ...] = kit.BASELINES
PLAYED_BY_PEOPLE: bool = False


def generate(
    game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
) -> list[CollabInstance]:
    """Hidden-number tasks with numbers below game.max_value. `processes` and `easy` are ignored."""
    return [
        numbers.hidden_number(seed=seed, index=index, max_value=game.max_value)
        for index in range(start, start + num)
    ]


def read(path: Path, game: GameConfig) -> list[CollabInstance]:
    """The tasks of a .parquet or .jsonl file, as `selfplay.data.prepare_collab` writes it.

    If there are code tasks, prints how their answers are isolated while they are graded.

    Raises:
        ValueError: for an invalid file; as sandbox.NoWall if the isolation that `game.code_wall`
            requires is not available.
    """
    instances = store.read_instances(path)
    if any(instance.task == "code" for instance in instances):
        wall = sandbox.available_wall(game.code_wall)
        print(f"{path}: isolation of code answers: {wall}", file=sys.stderr, flush=True)
    return instances


def read_recorded(path: Path) -> NoReturn:
    """Raises ValueError: the game has no recordings."""
    raise ValueError(
        f"game.name must be matching to start from recorded games, got collab ({path})"
    )


def recorded_tally(record: Mapping[str, Any], instance: CollabInstance) -> NoReturn:
    """Raises ValueError: the game has no recordings."""
    raise ValueError("collab has no recorded games")


def recorded_messages(record: Mapping[str, Any]) -> NoReturn:
    """Raises ValueError: the game has no recordings."""
    raise ValueError("collab has no recorded games")


def read_people(path: Path) -> NoReturn:
    """Raises ValueError: the game has no recordings."""
    raise ValueError(f"game.name must be matching to imitate recorded games, got collab ({path})")


def digest(instance: CollabInstance) -> str:
    """The task's key: tasks have no other name."""
    return instance.key


def new_game(instance: CollabInstance, game: GameConfig) -> CollabGame:
    """A new conversation about a task."""
    options = CollabOptions(
        brief=game.brief, private_reasoning=game.private_reasoning, code_wall=game.code_wall
    )
    return CollabGame(instance, options)


def make_script(spec: str, *, seed: int) -> Script:
    """A scripted user or assistant from a spec such as "user:eager=0.5" or "ask"."""
    return script.make_scripted(spec, seed=seed)


def seated(spec: str) -> tuple[str, str]:
    """The specs (user, assistant) of a scripted pair; `spec` is one of the two."""
    return kit.seated(spec)


def described(instances: Sequence[CollabInstance], game: GameConfig) -> dict[str, Any]:
    """The number of instances of each kind of task."""
    return {"tasks": dict(Counter(instance.task for instance in instances))}


def phrases(
    instances: Sequence[CollabInstance], game: GameConfig, *, split_lines: bool
) -> Sequence[str]:
    """Tags and sentences of the hidden-number task in the brief style; () in the full style.

    `split_lines` is ignored: no move of this game has several lines.
    """
    if not game.brief:
        return ()
    sentences = (script.ASK_NUMBER, script.SMALL_TALK)
    return [f"[{ANSWER}]", f"[{END}]", *sentences, *texts.EMPTY_REPLIES, *numbers.phrases()]
