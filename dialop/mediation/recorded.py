"""Reads recorded human games of DialOp: instances, logs as moves, and rescored results.

A record is one JSON object of the published file: `player_data` (calendars, flights, weights),
`action_log`, `scores`, and optionally `result`. Points are as in score.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from reprlib import repr as short
from typing import Any

from dialop.mediation.moves import render_proposal
from dialop.mediation.records import (
    AGENT,
    FIRST_DAY,
    MAX_ARRIVAL_PREF,
    MAX_ITEMS,
    USERS,
    Act,
    Flight,
    MediationInstance,
    Pair,
    User,
)
from dialop.mediation.score import pair_costs, points_of, referenced
from dialop.starts import Rescored, answer_of, message_of, place, read_log
from dialop.values import checked_int, checked_list, field, parsed

_TERMS = ("calendar", "price", "arrival_time", "total")


def instance_from_record(record: Mapping[str, Any], *, key: str) -> MediationInstance:
    """The record's users and flights, checked.

    Raises:
        ValueError: for an invalid record; names the field.
    """
    players = checked_list(
        field(record, "player_data", "a recorded game"), "player_data", low=2, high=MAX_ITEMS
    )
    name, prefs = "arrival_time_pref", set[int]()
    for i, player in enumerate(players[:2]):
        pref = field(player, name, f"user {i}")
        prefs.add(checked_int(pref, f"user {i}: {name}", low=0, high=MAX_ARRIVAL_PREF))
    if len(prefs) != 1:
        raise ValueError(f"both users must have the same {name}, got {sorted(prefs)}")
    users = _user(players[0], "user 0"), _user(players[1], "user 1")
    return referenced(MediationInstance(key, users, prefs.pop()))


def moves_from_record(record: Mapping[str, Any], instance: MediationInstance) -> list[Act]:
    """The log's entries as moves. A proposal's flights become indices into the users' lists.

    Raises:
        ValueError: for an entry that is not a move of this game; names it (from 0).
    """
    return read_log(record.get("action_log"), lambda entry: _move(entry, instance))


def longest(moves: Sequence[Act]) -> int:
    """The most moves in a start: all but the last, the answer that ends a game."""
    return max(0, len(moves) - 1)


def accepted_pair(moves: Sequence[Act]) -> Pair | None:
    """The agreed pair of the record: the last proposal, if both users' last answers accept it; else
    None."""
    pair, last = None, dict[int, str]()
    for act in moves:
        if act.flights is not None:
            pair, last = act.flights, {}
        elif act.kind != "message":
            last[act.seat] = act.kind
    return pair if all(last.get(user) == "accept" for user in USERS) else None


def rescore(record: Mapping[str, Any], *, key: str) -> Rescored:
    """Rescore a record, and compare the terms of each proposal. Raises ValueError for a game that
    cannot be scored."""
    instance = instance_from_record(record, key=key)
    moves = moves_from_record(record, instance)
    pair = accepted_pair(moves)
    if pair is None:
        raise ValueError("no proposal that both users accepted at the end of the log")
    numbers = place(instance, points_of(instance, pair))
    said = {"score": field(field(record, "scores", "a recorded game"), "reward", "scores")}
    result = record.get("result")
    if isinstance(result, Mapping):
        said |= {name: result[name] for name in ("best", "worst", "norm") if name in result}
    return Rescored(numbers, said, _differences(record, instance, moves))


def minute_of(text: Any, name: str) -> int:
    """A time such as 2023-06-01T07:19 in minutes from 00:00 of the first day."""
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a time like 2023-06-01T07:19, got {short(text)}"
        ) from None
    if moment.tzinfo is not None or moment.second or moment.microsecond:
        raise ValueError(f"{name} must be a whole minute without a time zone, got {short(text)}")
    days = (moment.date() - FIRST_DAY).days
    return days * 24 * 60 + moment.hour * 60 + moment.minute


def _differences(
    record: Mapping[str, Any], instance: MediationInstance, moves: Sequence[Act]
) -> list[str]:
    """A line for each proposal and user whose recorded terms differ from this game's."""
    lines = []
    for number, act in enumerate(moves):
        if act.flights is None:
            continue
        proposals = record["action_log"][number]["proposals"]
        for user, own in enumerate(pair_costs(instance, act.flights)):
            cost = field(proposals[user], "cost", f"log entry {number}")
            recorded = tuple(field(cost, term, f"log entry {number}: cost") for term in _TERMS)
            terms = (own.calendar, own.price, own.arrival, own.total)
            if terms != recorded:
                said = f"{', '.join(_TERMS)} are {terms}, the recording says {recorded}"
                lines.append(f"log entry {number}, user {user}: {said}")
    return lines


def _user(player: Any, where: str) -> User:
    def calendar(name: str, *, shared: bool) -> list[dict[str, Any]]:
        events = checked_list(field(player, name, where), f"{where}: {name}", high=MAX_ITEMS)
        return [{**_timed(event, where), "shared": shared} for event in events]

    def times(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted((e["start"], e["end"], e.get("importance")) for e in events)

    events = calendar("shared_calendar", shared=True) + calendar("unshared_calendar", shared=False)
    if times(events) != times(calendar("calendar", shared=True)):
        raise ValueError(f"{where}: calendar must hold the shared and the unshared events")
    flights = checked_list(field(player, "flights", where), f"{where}: flights")
    data = {
        **player,
        "events": sorted(events, key=lambda event: event["start"]),
        "flights": [_timed(flight, f"{where}, flight {i}") for i, flight in enumerate(flights)],
    }
    return parsed(User, data, where)


def _timed(data: Any, where: str) -> dict[str, Any]:
    """An event or flight with its times in minutes."""
    times = {n: minute_of(field(data, n, where), f"{where}: {n}") for n in ("start", "end")}
    return {**data, **times}


def _move(entry: Any, instance: MediationInstance) -> Act:
    """One log entry as a move. Raises ValueError for anything else."""
    kind = field(entry, "type")
    if kind == "proposal":
        flights = checked_list(field(entry, "proposals"), "proposals", low=2, high=MAX_ITEMS)
        first, second = instance.users
        pair = _flight_id(flights[0], first, "user 0"), _flight_id(flights[1], second, "user 1")
        return Act(AGENT, "propose", render_proposal(pair), None, pair)
    seat = checked_int(field(entry, "player"), "player", low=0, high=AGENT)
    room = checked_int(field(entry, "vroom"), "vroom", low=0, high=1)
    if seat not in (AGENT, room):
        raise ValueError(f"player {seat} is not in room {room}")
    if kind == "message":
        return Act(seat, "message", message_of(entry), room)
    answer = answer_of(entry)
    if seat not in USERS:
        raise ValueError("only a user answers a proposal")
    return Act(seat, answer, "", room)


def _flight_id(data: Any, user: User, where: str) -> int:
    """The index of a proposal's flight in the user's list.

    If the user has the same flight twice, the recorded id decides.
    """
    what = f"{where}, proposed flight"
    flight = parsed(Flight, _timed(field(data, "proposal_data", where), what), what)
    ids = [i for i, other in enumerate(user.flights) if other == flight]
    if not ids:
        raise ValueError(f"the flight proposed to {where} is not in the list")
    recorded = data.get("flight_id")
    return recorded if recorded in ids else ids[0]
