"""Mediation as `dialop.kit` describes a game: its roles, options, files and scripted players."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from dialop import starts
from dialop.logged import Rules, part_of
from dialop.mediation import generate, pages, recorded, scripted, store, texts
from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.records import MAX_IMPORTANCE, USERS, MediationInstance
from dialop.mediation.score import calendar_costs, pair_costs, pair_scores
from dialop.mediation.search import referenced

TITLE = "mediation (DialOp)"
ROLES = ("user", "user", "agent")
SCRIPT_NAMES = scripted.NAMES
BASELINES = ("honest", "solo", "random")
PLAYED_BY_PEOPLE = True

generate_instance = generate.generate_instance
make_script = scripted.make_scripted
restore = MediationGame.from_state
read, write = store.read_instances, store.write_instances
replay, read_recorded = recorded.replay, recorded.read_recorded
recorded_messages = starts.recorded_messages
picture, forms, rooms = pages.picture, pages.forms, pages.rooms


@dataclass(frozen=True)
class Options(MediationRecipe, Rules):
    """The recipe of instances and the rules of play."""


def new_game(instance: MediationInstance, options: Rules) -> MediationGame:
    """A game at its start."""
    return MediationGame(instance, part_of(options, Rules))


def vary(instance: MediationInstance, seat: int, *, seed: int) -> MediationInstance | None:
    """The instance with other importances of one user's events, which only that user sees; None for
    the agent, who sees only what a user sees too."""
    if seat not in USERS or not instance.users[seat].events:
        return None
    rng = np.random.default_rng((seed, seat))
    events = [
        replace(
            event,
            importance=(event.importance - 1 + int(rng.integers(1, MAX_IMPORTANCE)))
            % MAX_IMPORTANCE
            + 1,
        )
        for event in instance.users[seat].events
    ]
    users = list(instance.users)
    users[seat] = replace(users[seat], events=tuple(events))
    return referenced(replace(instance, users=(users[0], users[1])))


def recorded_tally(record: Mapping[str, Any], instance: MediationInstance) -> dict[str, float]:
    """The measures of a recorded human game. Errors were not recorded, and the parser of scripted
    statements finds almost none in people's prose."""
    moves = recorded.moves_from_record(record, instance)
    pair, said = recorded.accepted_pair(moves), [act.text for act in moves if act.kind == "message"]
    score = 0.0
    if pair is not None:
        score = instance.norm(sum(costs.total for costs in pair_costs(instance, pair)))
    kinds = [act.kind for act in moves]
    return {
        **starts.tally(
            score,
            said,
            accepted=pair is not None,
            proposals=kinds.count("propose"),
            turns=len(moves),
        ),
        "questions": float(sum("?" in text for text in said)),
        "rejections": float(kinds.count("reject")),
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


def figures(instances: Sequence[MediationInstance]) -> str:
    """Mean scores of the best, worst, random and agent's own pair, and mean list sizes."""
    users = [user for instance in instances for user in instance.users]
    random = [
        instance.norm(float(pair_scores(instance.users, instance.arrival_pref).mean()))
        for instance in instances
    ]
    return (
        f"best {fmean(i.best for i in instances):.1f}, "
        f"worst {fmean(i.worst for i in instances):.1f}, "
        f"random pair {fmean(random):.3f}, "
        f"agent alone {fmean(i.norm(i.alone) for i in instances):.3f}; a user has "
        f"{fmean(len(user.flights) for user in users):.1f} flights and "
        f"{fmean(len(user.events) for user in users):.1f} events, "
        f"{fmean(sum(e.shared for e in user.events) for user in users):.1f} shared"
    )


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a recorded game is one of mediation."""
    return "player_data" in record
