"""The mediation game's part of `python -m dialop`: its options, its files, its games."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe, generate_many
from dialop.mediation.kit import Options
from dialop.mediation.recorded import replay
from dialop.mediation.records import MediationInstance, MediationOptions
from dialop.mediation.score import pair_scores
from dialop.mediation.store import read_instances, write_instances

__all__ = [
    "add_options",
    "generate",
    "is_record",
    "new_game",
    "read_instances",
    "replay",
    "write_instances",
]

_RECIPE = tuple(entry.name for entry in fields(MediationRecipe))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `generate`, those of the recipe."""
    for entry in fields(Options):
        if entry.name in _RECIPE:
            parser.add_argument(
                "--" + entry.name.replace("_", "-"),
                type=type(entry.default),
                default=entry.default,
                help=entry.metadata["sentence"],
            )


def generate(args: argparse.Namespace) -> tuple[Sequence[MediationInstance], str]:
    """The instances that the options ask for, and their mean figures in one line."""
    instances = generate_many(
        MediationRecipe(**{name: getattr(args, name) for name in _RECIPE}),
        seed=args.seed,
        num=args.num,
        start=args.start,
        processes=args.processes,
    )
    return instances, figures(instances) if instances else ""


def figures(instances: Sequence[MediationInstance]) -> str:
    """Mean reference values of the instances in one line, to check what was generated."""
    users = [user for instance in instances for user in instance.users]
    random = [
        instance.norm(float(pair_scores(instance.users, instance.arrival_pref).mean()))
        for instance in instances
    ]
    return (
        f"best {statistics.fmean(i.best for i in instances):.1f}, "
        f"worst {statistics.fmean(i.worst for i in instances):.1f}, "
        f"random pair {statistics.fmean(random):.3f}, "
        f"agent alone {statistics.fmean(i.norm(i.alone) for i in instances):.3f}; a user has "
        f"{statistics.fmean(len(user.flights) for user in users):.1f} flights and "
        f"{statistics.fmean(len(user.events) for user in users):.1f} events, "
        f"{statistics.fmean(sum(e.shared for e in user.events) for user in users):.1f} shared"
    )


def new_game(instance: MediationInstance, args: argparse.Namespace) -> MediationGame:
    """A game of the instance, with the rules that the options ask for."""
    options = MediationOptions(
        messages=not args.no_messages, brief=args.brief, private_reasoning=args.private_reasoning
    )
    return MediationGame(instance, options)


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a recorded game is one of mediation."""
    return "player_data" in record
