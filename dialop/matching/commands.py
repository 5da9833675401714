"""The matching game's part of `python -m dialop`: its options, its files, its games."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dialop.matching.board import MatchingInstance, MatchingOptions
from dialop.matching.game import MatchingGame
from dialop.matching.generate import KEEPS, MatchingRecipe, generate_many
from dialop.matching.recorded import replay
from dialop.matching.store import read_instances, write_instances

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
    """Add the options of `generate` that describe boards."""
    defaults = MatchingRecipe()
    parser.add_argument(
        "--size", type=int, default=defaults.size, help="number of reviewers, 2 to 8"
    )
    parser.add_argument(
        "--p-observed",
        type=float,
        default=defaults.p_observed,
        help="probability that a seat sees a cell",
    )
    parser.add_argument(
        "--scale",
        action=argparse.BooleanOptionalAction,
        default=defaults.scale,
        help="multiply each seat's values by a hidden factor from 1 to 10",
    )
    parser.add_argument(
        "--max-value", type=int, default=defaults.max_value, help="all values are below this"
    )
    parser.add_argument(
        "--hardness",
        type=float,
        default=defaults.hardness,
        help="keep a table if solo value x hardness < best value",
    )
    parser.add_argument(
        "--keep", choices=KEEPS, default=defaults.keep, help="seats for which that must hold"
    )
    parser.add_argument(
        "--max-tables",
        type=int,
        default=defaults.max_tables,
        help="most tables to reject for one instance",
    )


def generate(args: argparse.Namespace) -> tuple[Sequence[MatchingInstance], str]:
    """The boards that the options ask for, and their mean reference values in one line."""
    recipe = MatchingRecipe(
        size=args.size,
        p_observed=args.p_observed,
        scale=args.scale,
        max_value=args.max_value,
        hardness=args.hardness,
        keep=args.keep,
        max_tables=args.max_tables,
    )
    instances = generate_many(
        recipe, seed=args.seed, num=args.num, start=args.start, processes=args.processes
    )
    return instances, _figures(instances) if instances else ""


def new_game(instance: MatchingInstance, args: argparse.Namespace) -> MatchingGame:
    """A game of the instance, with the rules that the options ask for."""
    options = MatchingOptions(
        messages=not args.no_messages, brief=args.brief, private_reasoning=args.private_reasoning
    )
    return MatchingGame(instance, options)


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a recorded game is one of matching."""
    return "table" in record


def _figures(instances: Sequence[MatchingInstance]) -> str:
    solo = [instance.norm(value) for instance in instances for value in instance.solo]
    better = [instance.norm(max(instance.solo)) for instance in instances]
    num_visible = [sum(map(sum, mask)) for instance in instances for mask in instance.masks]
    best = [float(instance.best) for instance in instances]
    return (
        f"best {statistics.fmean(best):.1f}, solo plan {statistics.fmean(solo):.3f}, "
        f"better solo plan {statistics.fmean(better):.3f}, "
        f"cells a seat sees {statistics.fmean(num_visible):.1f}"
    )
