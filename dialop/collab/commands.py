"""The collab game's part of `python -m dialop`: its options, its files, its games."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dialop.collab.game import CollabGame
from dialop.collab.numbers import hidden_number
from dialop.collab.store import read_instances, write_instances
from dialop.collab.task import CollabInstance, CollabOptions

__all__ = [
    "add_options",
    "generate",
    "is_record",
    "new_game",
    "read_instances",
    "replay",
    "write_instances",
]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `generate` that describe hidden-number tasks."""
    parser.add_argument("--max-value", type=int, default=100, help="all numbers are below this")


def generate(args: argparse.Namespace) -> tuple[Sequence[CollabInstance], str]:
    """The hidden-number tasks that the options ask for. There is nothing to say about them."""
    if args.max_value < 2:
        raise ValueError(f"--max-value must be at least 2, got {args.max_value}")
    indices = range(args.start, args.start + args.num)
    tasks = [hidden_number(seed=args.seed, index=i, max_value=args.max_value) for i in indices]
    return tasks, ""


def new_game(instance: CollabInstance, args: argparse.Namespace) -> CollabGame:
    """A conversation about the task. Raises ValueError for --no-messages."""
    if args.no_messages:
        raise ValueError("--no-messages cannot be used with collab, which needs messages")
    options = CollabOptions(brief=args.brief, private_reasoning=args.private_reasoning)
    return CollabGame(instance, options)


def is_record(record: Mapping[str, Any]) -> bool:
    """False: nobody recorded games of collab."""
    return False


def replay(record: dict[str, Any], *, index: int) -> NoReturn:
    """Raises ValueError: the game has no recordings."""
    raise ValueError("collab has no recorded games")
