"""Reads recorded human games of DialOp: cities as instances, logs as moves, and rescored results.

A record is one JSON object of the published file: `events`, `preferences`, `action_log`, `result`.
Totals are in points. docs/notes/planning.md lists the differences between the recorded rules and
this game's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

from dialop.planning.board import AGENT, USER, Action, Plan, PlanningInstance, Site, check_city
from dialop.planning.preferences import Kind, Preference
from dialop.planning.proposal import render_plan
from dialop.planning.score import referenced, sheet_of
from dialop.starts import Rescored, answer_of, message_of, place, read_log, tally
from dialop.values import check_fields, checked_int, checked_list, checked_string, field, parsed

FIELDS = ("events", "preferences", "action_log")
SLOTS = 3
MILES_PER_DEGREE = 69.0
# For each recorded class of preference its kind here, and the arguments for its fields.
_KINDS: dict[str, tuple[Kind, dict[str, str]]] = {
    "FeaturePreference": ("feature", {"name": "name"}),
    "WantToGo": ("sites", {"sites": "event_set", "penalised": "penalize"}),
    "AtLeastOneEventType": ("category", {"name": "etype", "penalised": "penalize"}),
    "PriceBudgetPreference": ("budget", {"budget": "budget"}),
    "DistancePreference": ("distance", {}),
}


def instance_from_record(record: Mapping[str, Any], *, key: str) -> PlanningInstance:
    """The record's city and preferences under this game's rules, checked.

    The seat of the first log entry moves first.

    Raises:
        ValueError: for an invalid record; names the field or the log entry (from 0).
    """
    check_fields(record, FIELDS, "a recorded game needs the fields")
    sites, preferences = _sites(record), _preferences(record, as_recorded=False)
    check_city(sites, preferences, slots=SLOTS)
    instance = referenced(key, sites, preferences, slots=SLOTS)
    moves = moves_from_record(record, instance)
    return replace(instance, first_seat=moves[0].seat) if moves else instance


def moves_from_record(record: Mapping[str, Any], instance: PlanningInstance) -> list[Action]:
    """The log's entries as moves.

    The kind of a move determines its seat: only the agent can propose and only the user can answer.
    The recorded `player` is only correct for messages.

    Raises:
        ValueError: for an entry that is not a move; names the entry (from 0).
    """
    return read_log(record["action_log"], lambda entry: _move(entry, instance.names))


def recorded_tally(record: Mapping[str, Any], instance: PlanningInstance) -> dict[str, float]:
    """The measures of a recorded human game, under this game's rules.

    Searches and errors were not recorded: people saw the whole city on a map.
    """
    moves = moves_from_record(record, instance)
    if (plan := _accepted_plan(moves)) is None:
        return tally(moves, None)
    total = sheet_of(instance.sites, instance.preferences, plan).total
    return tally(moves, instance.norm(total))


def rescore(record: Mapping[str, Any], *, key: str) -> Rescored:
    """Score a record's accepted plan under the rules of the recording; `norm_here` is its
    normalized total under this game's rules. Raises ValueError for a game that cannot be scored."""
    instance = instance_from_record(record, key=key)
    plan = _accepted_plan(moves_from_record(record, instance))
    if plan is None:
        raise ValueError("no accepted full plan at the end of the log")
    theirs = _preferences(record, as_recorded=True)
    as_recorded = referenced(key, instance.sites, theirs, slots=SLOTS)
    numbers = place(as_recorded, sheet_of(instance.sites, theirs, plan).total)
    here = sheet_of(instance.sites, instance.preferences, plan).total
    said = field(record, "result", "a recorded game")
    return Rescored(
        {**numbers, "norm_here": instance.norm(here)},
        {name: field(said, name, "result") for name in numbers},
    )


def _accepted_plan(moves: Sequence[Action]) -> Plan | None:
    """The full plan that the last move accepts, None if there is none."""
    plan = next((move.plan for move in reversed(moves) if move.plan is not None), (None,))
    return plan if moves and moves[-1].kind == "accept" and None not in plan else None


def _sites(record: Mapping[str, Any]) -> tuple[Site, ...]:
    """The record's sites. Positions are degrees times 69, as in the recording's distances."""
    sites = []
    for number, event in enumerate(checked_list(record["events"], "events")):
        loc = field(event, "loc", f"events[{number}]")
        if not isinstance(loc, list) or not all(isinstance(x, int | float) for x in loc):
            raise ValueError(f"events[{number}].loc must be two numbers, got {short(loc)}")
        data = {
            "name": event.get("name"),
            "category": event.get("etype"),
            "price": event.get("est_price"),
            "at": [MILES_PER_DEGREE * x for x in loc],
            "features": event.get("features"),
        }
        sites.append(parsed(Site, data, f"events[{number}]"))
    return tuple(sites)


def _preferences(record: Mapping[str, Any], *, as_recorded: bool) -> tuple[Preference, ...]:
    """The record's preferences.

    Two features have an underscore in the recorded preferences but a blank in the sites, so they
    never scored in the recordings. Without `as_recorded`, the underscore is read as a blank.
    """
    entries = checked_list(record["preferences"], "preferences")
    return tuple(
        _preference(entry, f"preferences[{number}]", as_recorded=as_recorded)
        for number, entry in enumerate(entries)
    )


def _preference(entry: Any, where: str, *, as_recorded: bool) -> Preference:
    if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[3], dict):
        raise ValueError(
            f"{where} must be [sentence, weight, class, arguments], got {short(entry)}"
        )
    sentence, weight, kind, arguments = entry
    if kind not in _KINDS:
        raise ValueError(f"{where}: unknown class {short(kind)}")
    weight = abs(checked_int(weight, f"{where}.weight", low=-10, high=10))
    kind, names = _KINDS[kind]
    data = {"kind": kind, "text": sentence, "weight": weight}
    data |= {name: arguments.get(theirs) for name, theirs in names.items()}
    if kind == "feature":
        name = checked_string(data["name"], f"{where}.name")
        data["name"] = name if as_recorded else name.replace("_", " ")
        sets = arguments.get("value_sets")
        if not isinstance(sets, list) or len(sets) != 2:
            raise ValueError(f"{where}.value_sets must be two lists, got {short(sets)}")
        data["disliked"], data["liked"] = sets
    return parsed(Preference, data, where)


def _move(entry: Any, names: Sequence[str]) -> Action:
    kind = field(entry, "type")
    if kind == "message":
        seat = checked_int(field(entry, "player"), "player", low=0, high=1)
        return Action(seat, "message", message_of(entry))
    if kind == "proposal":
        slots = field(entry, "proposal")
        if not isinstance(slots, list) or len(slots) != 2 * SLOTS - 1:
            raise ValueError(f"proposal must be {2 * SLOTS - 1} slots, got {short(slots)}")
        plan = tuple(None if slot is None else _index(slot, names) for slot in slots[::2])
        return Action(AGENT, "propose", render_plan(plan, names), plan)
    return Action(USER, answer_of(entry), "")


def _index(slot: Any, names: Sequence[str]) -> int:
    name = field(slot, "name")
    if name not in names:
        raise ValueError(f"{short(name)} is not a site")
    return names.index(name)
