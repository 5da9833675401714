"""The wording of scripted players' moves: several phrasings in the full style, one in the brief
style. Private text has one phrasing in each style.

`statements.read_statements` parses every phrasing of costs, terms and events exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dialop.mediation.moves import render_proposal
from dialop.mediation.records import Costs, Event, Flight, Pair
from dialop.mediation.score import overlap
from dialop.mediation.texts import cost_lines, event_text, hour_text, span_text, time_text

SMALL_TALK = "hi"
ASK = "?"
_GREETINGS = ("Hello!", "Hi, please book me a flight.", "Good morning. I need a flight.")
_QUESTIONS = (
    "What does each of your flights cost you in your calendar?",
    "Which of your flights are in the way of important events?",
    "Please tell me the importance of the events that each flight overlaps.",
)
_OPENERS = ("Hi!", "Here is my calendar.", "These matter to me.", "Hello, this is what I have.", "")
_REASONS = ("Not that one.", "I hope for something better.", "Can we do better?", "")


def greeting(rng: np.random.Generator, *, brief: bool) -> str:
    """A message that states nothing."""
    return f"[message] {SMALL_TALK if brief else _pick(_GREETINGS, rng)}"


def question(user: int, rng: np.random.Generator, *, brief: bool) -> str:
    """The agent's question to a user about the costs of the flights."""
    return f"{user}: [message] {ASK if brief else _pick(_QUESTIONS, rng)}"


def costs_message(costs: Mapping[int, int], rng: np.random.Generator, *, brief: bool) -> str:
    """A user's message with the calendar costs of flights, {id: cost}."""
    if brief:
        return f"[message]\n{cost_lines(costs.items())}"
    verb = _pick((" costs", " costs me", ":"), rng)
    noun = _pick(("id", "flight"), rng)
    listing = ", ".join(f"{noun} {flight}{verb} {-cost}" for flight, cost in costs.items())
    return "[message] " + f"{_pick(_OPENERS, rng)} {listing}.".strip()


def events_message(events: Sequence[Event], rng: np.random.Generator) -> str:
    """A user's message with events and their importance (only in the full style)."""
    listing = "; ".join(event_text(event) for event in events) or "My calendar is empty"
    return "[message] " + f"{_pick(_OPENERS, rng)} {listing}".strip()


def terms_message(costs: Costs, rng: np.random.Generator, *, brief: bool) -> str:
    """A user's message with the terms of a proposal that it has rejected."""
    if brief:
        return f"[message]\n{costs.calendar} {costs.price} {costs.arrival}"
    terms = f"calendar {costs.calendar}, price {costs.price}, arrival {costs.arrival}"
    return "[message] " + f"{_pick(_REASONS, rng)} It gives me {terms}.".strip()


def proposal(pair: Pair) -> str:
    """The agent's proposal."""
    return f"all: [propose] {render_proposal(pair)}"


class Row(NamedTuple):
    """A flight in the agent's private text. `hour` is its hour of arrival, `following` the hour of
    its user's next flight, None for the last; `conflicts` counts shared events; `cost` is the
    believed calendar cost in points, `by_price` the loss by price in steps. Ordered by hour."""

    hour: int
    user: int
    flight: int
    conflicts: int
    price: int
    following: int | None
    cost: int
    by_price: int


def usual(user: int, tens: int, *, brief: bool) -> str:
    """The agent's private line about a user's usual price, given in tens of dollars."""
    return f"Flights {user} usual {tens}" if brief else f"user {user} usual ${10 * tens}"


def valued(row: Row, values: tuple[int, int], so_far: str, found: str, *, brief: bool) -> list[str]:
    """The agent's private lines about a flight. `values` are the hours since the previous line and
    the loss by both terms, `so_far` and `found` the best flights and the best pair so far."""
    gap, loss = values
    hour, following = (
        "-" if each is None else f"{each}:" if brief else hour_text(each)
        for each in (row.hour, row.following)
    )
    if brief:
        copied = f"{row.flight} {row.conflicts} {row.price} {hour} {following}"
        line = f"{copied} {row.cost} {row.by_price} {gap} {loss} {so_far} {found}"
        return [f"Flights {row.user}", line]
    copied = f"user {row.user} id {row.flight} ${row.price} {hour}, next {following}"
    terms = f"costs {-row.cost}, price {row.by_price}, hours {gap}, loss {loss}"
    return [f"{copied}: {terms}; {so_far}; {found}"]


def overlap_lines(flights: Sequence[Flight], events: Sequence[Event]) -> list[str]:
    """A user's private lines about its flights: their times, then the importance and the start of
    each event that the flight overlaps, with the sum so far. The last sum is the flight's cost."""
    lines = []
    for i, flight in enumerate(flights):
        line, cost = f"id {i} {span_text(flight.start, flight.end)}", 0
        for event in events:
            if overlap((event.start, event.end), (flight.start, flight.end)):
                cost += event.importance
                line += f", ({event.importance}) {time_text(event.start).split(' ', 1)[1]} {cost}"
        lines.append(line)
    return lines


def malformed(text: str, rng: np.random.Generator) -> str:
    """The same move with an injected error: a missing or wrong tag, a missing recipient, or a
    proposal for one user."""
    if text.startswith("all:"):
        kind = rng.integers(3)
        if kind == 0:
            return text.removeprefix("all: ")
        if kind == 1:
            return text.rpartition(",")[0]
        return text.replace("[propose]", "[proposal]")
    head, _, content = text.partition("]")
    if head[0] != "[":
        return f"{head[3:]}]{content}"
    return content.strip() or head[1:]


def _pick(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]
