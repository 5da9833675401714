"""Mediation as the trainer and the command line know it: its roles, options, files and players."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from dialop.kit import option
from dialop.mediation import scripted, starts, store, texts
from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe, generate_many
from dialop.mediation.recorded import accepted_pair, moves_from_record, replay, said_in
from dialop.mediation.records import (
    MAX_ARRIVAL_PREF,
    MAX_DAYS,
    MAX_IMPORTANCE,
    MAX_ITEMS,
    MAX_PRICE_PREF,
    USERS,
    MediationInstance,
    MediationOptions,
)
from dialop.mediation.score import calendar_costs, pair_costs
from dialop.mediation.search import with_references

__all__ = [
    "make_script",
    "read",
    "read_recorded",
    "recorded_messages",
    "replay",
    "restore",
    "write",
]

ROLES = ("user", "user", "agent")
SCRIPT_NAMES = scripted.NAMES
BASELINES = ("honest", "solo", "random")
PLAYED_BY_PEOPLE = True

_PLAIN = MediationRecipe()


@dataclass(frozen=True)
class Options:
    """The rules of play and the recipe of instances (dialop/mediation/generate.py)."""

    messages: bool = True
    brief: bool = False
    private_reasoning: bool = False
    days: int = option(
        _PLAIN.days,
        "length of the window, from 9:00 of the first day to 19:00 of the last",
        low=1,
        high=MAX_DAYS,
    )
    flights: int = option(
        _PLAIN.flights,
        "flights drawn for each user; those that overlap no event are dropped",
        low=1,
        high=MAX_ITEMS,
    )
    keep_flights: int = option(
        _PLAIN.keep_flights,
        "keep exactly this many of the remaining flights; 0 keeps all",
        low=0,
        high=MAX_ITEMS,
    )
    events: int = option(
        _PLAIN.events,
        "keep exactly this many events of each user; 0 keeps all",
        low=0,
        high=8 * MAX_DAYS,
    )
    p_event: float = option(
        _PLAIN.p_event, "probability of an event at a free half hour", low=0.01, high=1.0
    )
    p_shared: float = option(
        _PLAIN.p_shared, "share of the events whose times the agent sees", low=0.0, high=1.0
    )
    max_price_pref: int = option(
        _PLAIN.max_price_pref,
        "the users' price weights are 1 to this; 0 means that prices do not count",
        low=0,
        high=MAX_PRICE_PREF,
    )
    max_arrival_pref: int = option(
        _PLAIN.max_arrival_pref,
        "the arrival weight is 1 to this; 0 means that arrivals do not count",
        low=0,
        high=MAX_ARRIVAL_PREF,
    )

    def __post_init__(self) -> None:
        self.recipe()

    def recipe(self) -> MediationRecipe:
        """The distribution of instances. Raises ValueError for options that exclude each other."""
        return MediationRecipe(
            **{entry.name: getattr(self, entry.name) for entry in fields(MediationRecipe)}
        )

    def rules(self) -> MediationOptions:
        """How the game is played."""
        return MediationOptions(self.messages, self.brief, self.private_reasoning)


def generate(options: Options, *, seed: int, start: int, num: int) -> list[MediationInstance]:
    """Instances start..start+num-1 of the stream `seed`."""
    return generate_many(options.recipe(), seed=seed, start=start, num=num)


def new_game(instance: MediationInstance, options: Options) -> MediationGame:
    """A game at its start."""
    return MediationGame(instance, options.rules())


def vary(instance: MediationInstance, seat: int, *, seed: int) -> MediationInstance | None:
    """The instance with other importances of one user's events, which only that user sees; None for
    the agent, who sees nothing that no user sees."""
    if seat not in USERS or not instance.users[seat].events:
        return None
    rng = np.random.default_rng((seed, seat))
    events = [
        replace(
            event, importance=(event.importance + int(rng.integers(1, MAX_IMPORTANCE))) % 10 + 1
        )
        for event in instance.users[seat].events
    ]
    users = list(instance.users)
    users[seat] = replace(users[seat], events=tuple(events))
    twin = replace(instance, users=(users[0], users[1]))
    best, worst, alone = with_references(twin)
    return replace(twin, best=best, worst=worst, alone=alone)


def recorded_tally(record: Mapping[str, Any], instance: MediationInstance) -> dict[str, float]:
    """The figures of people's recorded game. Errors were not recorded, and the reader of scripted
    statements finds almost none in people's prose."""
    moves = moves_from_record(record, instance)
    pair, said = accepted_pair(moves), [act.text for act in moves if act.kind == "message"]
    score = 0.0
    if pair is not None:
        score = instance.norm(sum(costs.total for costs in pair_costs(instance, pair)))
    return {
        "score": score,
        "agreement": float(pair is not None),
        "optimal": float(score > 1 - 1e-9),
        "messages": float(len(said)),
        "words": float(sum(len(text.split()) for text in said)),
        "questions": float(sum("?" in text for text in said)),
        "proposals": float(sum(act.kind == "propose" for act in moves)),
        "rejections": float(sum(act.kind == "reject" for act in moves)),
        "turns": float(len(moves)),
    }


def described(instances: Sequence[MediationInstance], options: Options) -> dict[str, Any]:
    """The mean numbers of flights and events of a user, and whether messages are allowed."""
    users = [user for instance in instances for user in instance.users]
    return {
        "flights_of_a_user": sum(len(user.flights) for user in users) / max(1, len(users)),
        "events_of_a_user": sum(len(user.events) for user in users) / max(1, len(users)),
        "messages_allowed": options.messages,
    }


def phrases(
    instances: Sequence[MediationInstance], options: Options, *, split_lines: bool
) -> list[str]:
    """Tags, recipients and costs of the brief style; none in the full style.

    `split_lines` is ignored: the parts of a line are separate tokens.
    """
    if not options.brief:
        return []
    users = [user for instance in instances for user in instance.users]
    most_cost = max(int(-calendar_costs(user).min()) for user in users)
    return texts.brief_phrases(most_cost)


make_script = scripted.make_scripted
restore = MediationGame.from_state
read = store.read_instances
write = store.write_instances
read_recorded = starts.read_recorded
recorded_messages = said_in
