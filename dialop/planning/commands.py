"""The planning game's part of `python -m dialop`: its options, its files, its games."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dialop.planning.board import PlanningInstance, PlanningOptions
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe, generate_many
from dialop.planning.recorded import replay
from dialop.planning.store import read_instances, write_instances

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
    """Add the options of `generate` that describe cities and preferences."""
    defaults = PlanningRecipe()
    parser.add_argument("--sites", type=int, default=defaults.sites, help="sites of a city")
    parser.add_argument("--slots", type=int, default=defaults.slots, help="sites of a plan")
    parser.add_argument(
        "--preferences",
        type=int,
        default=defaults.preferences,
        help="most preferences of a user, without the one for short ways",
    )
    parser.add_argument(
        "--distance",
        action=argparse.BooleanOptionalAction,
        default=defaults.distance,
        help="whether users want short ways",
    )
    parser.add_argument(
        "--simple", action="store_true", help="only features that every site has, yes or no"
    )


def generate(args: argparse.Namespace) -> tuple[Sequence[PlanningInstance], str]:
    """The instances that the options ask for, and their mean reference values in one line."""
    recipe = PlanningRecipe(
        sites=args.sites,
        slots=args.slots,
        preferences=args.preferences,
        distance=args.distance,
        simple=args.simple,
    )
    instances = generate_many(
        recipe, seed=args.seed, num=args.num, start=args.start, processes=args.processes
    )
    return instances, _figures(instances) if instances else ""


def new_game(instance: PlanningInstance, args: argparse.Namespace) -> PlanningGame:
    """A game of the instance, with the rules that the options ask for."""
    options = PlanningOptions(
        messages=not args.no_messages, brief=args.brief, private_reasoning=args.private_reasoning
    )
    return PlanningGame(instance, options)


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a recorded game is one of planning."""
    return "preferences" in record and "events" in record


def _figures(instances: Sequence[PlanningInstance]) -> str:
    means = [
        f"{name} {statistics.fmean(values):.{digits}f}"
        for name, values, digits in (
            ("best", [float(i.best) for i in instances], 1),
            ("worst", [float(i.worst) for i in instances], 1),
            ("random plan", [i.norm(i.mean) for i in instances], 3),
            ("preferences", [float(len(i.preferences)) for i in instances], 1),
        )
    ]
    return ", ".join(means)
