"""The kit of mediation (`dialop.kit`): settings, files, scripted players, forms, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dialop import people, rows, starts
from dialop.forms import ACCEPT_OR_REJECT, Choices, Form, say, worth
from dialop.logged import Rules, part_of
from dialop.mediation import generate, recorded, scripted, texts
from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.records import AGENT, MAX_IMPORTANCE, USERS, Act, AgentView, MediationInstance
from dialop.mediation.score import calendar_costs, points_of, referenced
from dialop.mediation.texts import flight_text
from dialop.values import parsed, plain

TITLE = "mediation (DialOp)"
ROLES = ("user", "user", "agent")
SCRIPT_NAMES = tuple(scripted.ScriptedPlayer.OPTIONS)
BASELINES = ("honest", "solo", "random")
PLAYED_BY_PEOPLE = True
FACTS = {
    "best": "points of the best pair",
    "worst": "of the worst",
    "alone": "score of the pair that the agent books without messages",
}
RECORD_FIELDS = ("player_data",)
ROOMS = tuple((user, AGENT) for user in USERS)

generate_instance = generate.generate_instance
make_script = scripted.make_scripted
restore = MediationGame.from_state
rescore, longest = recorded.rescore, recorded.longest
instance_from_record, moves_from_record = recorded.instance_from_record, recorded.moves_from_record


@dataclass(frozen=True)
class Options(MediationRecipe, Rules):
    """The recipe of instances and the rules of play."""


def new_game(instance: MediationInstance, options: Rules) -> MediationGame:
    """A new game, after the instance's opening if it has one."""
    return MediationGame(instance, part_of(options, Rules))


def vary(instance: MediationInstance, seat: int, *, seed: int) -> MediationInstance | None:
    """The instance with other importances of one user's events, which only that user sees; None for
    the agent, who sees only what a user also sees."""
    if seat not in USERS or not instance.users[seat].events:
        return None
    rng, events = np.random.default_rng((seed, seat)), list(instance.users[seat].events)
    for i, event in enumerate(events):
        shifted = event.importance - 1 + int(rng.integers(1, MAX_IMPORTANCE))
        events[i] = replace(event, importance=shifted % MAX_IMPORTANCE + 1)
    users = list(instance.users)
    users[seat] = replace(users[seat], events=tuple(events))
    return referenced(replace(instance, users=(users[0], users[1])))


def recorded_tally(record: Mapping[str, Any], instance: MediationInstance) -> dict[str, float]:
    """The measures of a recorded human game. Errors were not recorded, and the parser of scripted
    statements finds almost none in people's prose."""
    moves = recorded.moves_from_record(record, instance)
    pair = recorded.accepted_pair(moves)
    score = instance.norm(points_of(instance, pair)) if pair is not None else None
    return {
        **starts.tally(moves, score),
        "questions": float(sum(act.kind == "message" and "?" in act.text for act in moves)),
        "rejections": float(sum(act.kind == "reject" for act in moves)),
    }


def written(act: Act, instance: MediationInstance) -> str:
    """A recorded move as its seat would write it."""
    return texts.move_text(act)


def digest(instance: MediationInstance) -> str:
    """A digest of the users' flights, events and weights, independent of the file."""
    return people.digest(instance.users, instance.arrival_pref)


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
    return texts.brief_phrases(
        most_cost,
        num_flights=max(len(user.flights) for user in users),
        hours=sorted({flight.end // 60 for user in users for flight in user.flights}),
    )


def rooms(game: MediationGame, seat: int) -> list[str]:
    """The agent has a room with each user; a user has one room."""
    return [] if seat in USERS else [f"user {user}" for user in USERS]


def forms(game: MediationGame, seat: int) -> list[Form]:
    """A user answers a proposal or writes to the agent, who writes to either user or proposes."""
    view = game.view(seat)
    if not isinstance(view, AgentView):
        hint = "Only the agent reads this"
        return list(ACCEPT_OR_REJECT) if game.answer_due else [say(hint)]
    users = [(f"user {user}", _flights(view, user)) for user in USERS]
    messages = [
        Form(f"To {name}", f"{user}: [message] ", hint=f"Only {name} reads this")
        for user, (name, _) in enumerate(users)
    ]
    propose = Form("Propose", "all: [propose] ", choices=users)
    return [*(messages if view.options.messages else ()), propose]


def _flights(view: AgentView, user: int) -> Choices:
    """The flights of a user, each as in a proposal and as on the page."""
    texts = [flight_text(flight) for flight in view.flights[user]] if view.flights else None
    return [
        (f"user {user}: id {i}", f"{i}: {texts[i]}" if texts else f"flight {i}")
        for i in range(len(view.prices[user]))
    ]


def picture(game: MediationGame, num: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """No table; the value of each proposal among the last `num` moves."""

    def points(act: Act) -> int | None:
        return points_of(game.instance, act.flights) if act.flights else None

    return worth(game, num, points)


def write(path: str | Path, instances: Sequence[MediationInstance]) -> None:
    """Write instances to one parquet file (`rows.write_rows`)."""
    lines = [plain(asdict(instance)) for instance in instances]
    for line in lines:
        del line["opening"]
    rows.write_rows(path, lines)


def read(path: str | Path) -> list[MediationInstance]:
    """Read the instances of a .parquet file, or of a .jsonl file of recorded human games.

    Raises ValueError and OSError as `rows.read_instances`.
    """
    return rows.read_instances(path, _from_row, recorded.instance_from_record)


def _from_row(row: dict[str, Any]) -> MediationInstance:
    instance = parsed(MediationInstance, row)
    right = referenced(instance)
    for name in ("best", "worst", "alone"):
        given, own = getattr(instance, name), getattr(right, name)
        if given != own:
            raise ValueError(f"{name} must be {own}, computed from its flights, got {given}")
    return instance
