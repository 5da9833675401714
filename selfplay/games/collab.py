"""The collaboration's kit (`selfplay.games.GameKit`): hidden numbers drawn online, tasks from
files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dialop.collab import numbers, sandbox, script, store, texts
from dialop.collab.game import CollabGame
from dialop.collab.task import ANSWER, ASSISTANT, END, USER, CollabInstance, CollabOptions
from dialop.game import Script
from selfplay.config import GameConfig

SCRIPT_NAMES: tuple[str, ...] = script.NAMES
BASELINES: tuple[str, ...] = ("ask", "guess")
LEARNER_SEAT: int | None = ASSISTANT
PLAYED_BY_PEOPLE: bool = False


def generate(
    game: GameConfig, *, seed: int, start: int, num: int, processes: int, easy: bool
) -> list[CollabInstance]:
    """Hidden-number tasks with numbers below game.max_value; drawing them takes no time, and none
    is easier."""
    return [
        numbers.hidden_number(seed=seed, index=index, max_value=game.max_value)
        for index in range(start, start + num)
    ]


def read(path: Path, game: GameConfig) -> list[CollabInstance]:
    """A .parquet or .jsonl of instances, such as `python -m selfplay.data.prepare_collab prepare` writes.

    Says, where there are code tasks, what their answers are graded behind. Raises sandbox.NoWall, a
    ValueError, where that is nothing and the settings do not allow it.
    """
    instances = store.read_instances(path)
    if any(instance.task == "code" for instance in instances):
        wall = sandbox.available_wall(game.code_wall)
        print(f"{path}: code answers are graded behind: {wall}", file=sys.stderr, flush=True)
    return instances


def read_recorded(path: Path) -> NoReturn:
    """Nobody recorded any."""
    raise ValueError(
        f"game.name must be matching to start from recorded games, got collab ({path})"
    )


def new_game(instance: CollabInstance, game: GameConfig) -> CollabGame:
    """A fresh conversation about a task."""
    options = CollabOptions(
        brief=game.brief, private_reasoning=game.private_reasoning, code_wall=game.code_wall
    )
    return CollabGame(instance, options)


def make_script(spec: str, *, seed: int) -> Script:
    """A scripted user or assistant from a spec such as "user:eager=0.5" or "ask"."""
    return script.make_scripted(spec, seed=seed)


def seated(spec: str) -> tuple[str, str]:
    """A scripted user in its seat, an assistant in the other; `spec` is one of them."""
    if script.make_scripted(spec, seed=0).seat == USER:
        return spec, "ask"
    return script.USER_SCRIPT, spec


def described(instances: Sequence[CollabInstance], game: GameConfig) -> dict[str, Any]:
    """How many instances there are of each kind of task."""
    return {"tasks": dict(Counter(instance.task for instance in instances))}


def phrases(
    instances: Sequence[CollabInstance], game: GameConfig, *, split_lines: bool
) -> Sequence[str]:
    """Tags and the sentences of the hidden-number task in the brief style; the full style has
    none. No move has lines to split."""
    if not game.brief:
        return ()
    said = (script.ASK_NUMBER, script.SMALL_TALK)
    return [f"[{ANSWER}]", f"[{END}]", *said, *texts.EMPTY_REPLIES, *numbers.phrases()]
