"""All text that a seat reads in mediation, except errors: rules, lists, moves, history.

There are two styles. The full style has a system prompt, flights and calendars with dates and clock
times, and explained costs. The brief style has only numbers, for very small models. In both, no
line of a player's message can be mistaken for a line of the game, for a proposal, or for a message
from another room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from dialop.mediation.records import (
    AGENT,
    FIRST_DAY,
    USERS,
    Act,
    AgentView,
    Costs,
    Event,
    Flight,
    UserView,
)
from dialop.tags import indent_further, indent_lookalikes

_DAY = 24 * 60

_USER_RULES = """\
You and a friend each need a flight to the same city. One agent books for both of you. You talk to \
the agent in a private room: your friend never reads what you write there, and you never read what \
your friend writes.

All three of you share one score, the sum of both travellers' points:
- Calendar: each event that overlaps the flight, in the air or partly, costs its importance. An \
event that begins in the minute of departure does not count.
- Price: {price_rule}
- Arrival: {arrival_rule}
The agent sees all flights of both of you, and {shared_rule}. Without an \
agreement all of you score zero.

Each turn is one move that starts with its tag:
{message_rule}[accept] the agent's proposal
[reject] the agent's proposal

{opening}When the agent proposes a flight for each of you, you see only your own, with its points. \
Both of you then answer with [accept] or [reject]. If both accept, the flights are booked and the \
game ends. If one rejects, the proposal is dropped{after_reject}."""

_AGENT_RULES = """\
You are an agent who books one flight for each of two users, user 0 and user 1, who travel to the \
same city. You talk to each of them in a private room; neither reads the other's room.

All three of you share one score, the sum of both users' points:
- Calendar: each of a user's events that overlaps the flight, in the air or partly, costs its \
importance, from 1 to 10. An event that begins in the minute of departure does not count. \
{shared_rule}
- Price: {price_rule}
- Arrival: {arrival_rule}
Without an agreement all of you score zero.

Each turn is one move that starts with whom it is for, then its tag:
{message_rule}all: [propose] user 0: id A, user 1: id B
where A and B are numbers of the flights in your lists. A proposal goes to both users; each sees \
the own flight with its points, and answers. If both accept, the flights are booked and the game \
ends. If one rejects, the proposal is dropped and you may propose again."""

_USER_MESSAGE = """\
[message] anything you want to tell the agent, who reads all lines but the first indented
"""
_AGENT_MESSAGE = """\
0: [message] anything you want to tell user 0, who reads all lines but the first indented
1: [message] anything you want to tell user 1, who reads all lines but the first indented
After a message to a user it is that user's turn in this room.
"""
# The first words of the brief style's own lines; its other lines start with a bracket. The last
# pattern is the start of an agent's move: the recipient and a tag.
_BRIEF_WORDS = (
    *("user", "agent", "you", "your", "error", "all", "off", "flights"),
    r"(?:(?:to|user|all|\d)[\W_]*)+(?=\[)",
)
BRIEF_OFF = "[off]"
BRIEF_OFF_YOURS = "[off] Your move."


def user_rules(view: UserView) -> str:
    """The full style's system prompt of a user."""
    num_shared = sum(event.shared for event in view.events)
    return _USER_RULES.format(
        price_rule=_price_rule(view.max_price_pref, "you"),
        arrival_rule=_arrival_rule(view.max_arrival_pref),
        shared_rule="the times of your shared events, but not their importance"
        if num_shared
        else "none of your events",
        message_rule=_USER_MESSAGE if view.options.messages else "",
        opening="You speak first. " if view.options.messages else "",
        after_reject=", and if it was you it is your move" if view.options.messages else "",
    )


def agent_rules(view: AgentView) -> str:
    """The full style's system prompt of the agent."""
    any_shared = any(view.shared)
    return _AGENT_RULES.format(
        shared_rule="You see the times of some events."
        if any_shared
        else "You see none of the events.",
        price_rule=_price_rule(view.max_price_pref, "each user"),
        arrival_rule=_arrival_rule(view.max_arrival_pref),
        message_rule=_AGENT_MESSAGE if view.options.messages else "",
    )


def user_board(view: UserView) -> str:
    """The full style's private lists of a user: flights with ids, then the calendar."""
    lines = [f"You are user {view.seat}.", "", "Your flights:"]
    lines += [f"id {i} | {flight_text(flight)}" for i, flight in enumerate(view.flights)]
    for shared, heading in (
        (True, "Your events, importance in brackets, whose times the agent sees:"),
        (False, "Your private events, importance in brackets:"),
    ):
        listed = [event_text(event) for event in view.events if event.shared == shared]
        lines += ["", heading, *(listed or ["none"])]
    return "\n".join(lines)


def agent_board(view: AgentView) -> str:
    """The full style's lists of the agent: each user's flights and shared events."""
    lines = []
    for user in USERS:
        lines += [f"Flights of user {user}:"]
        lines += [f"id {i} | {flight_text(flight)}" for i, flight in enumerate(view.flights[user])]
        lines += ["", f"Shared events of user {user}:"]
        lines += [span_text(start, end) for start, end in view.shared[user]] or ["none"]
        lines += [""]
    return "\n".join(lines).rstrip()


def brief_agent_board(view: AgentView) -> str:
    """The brief style's list of the agent: `Flights N`, then one line per flight of each user.

    A line has the id, the number of shared events in conflict, the price and the arrival in hours
    and minutes from the first midnight. Columns that are 0 for all flights are left out.
    """
    columns = [view.conflicts, view.prices, view.arrivals]
    used = [column for column in columns if any(any(values) for values in column)]
    lines = []
    for user in USERS:
        lines.append(f"Flights {user}")
        for i in range(len(view.conflicts[user])):
            cells = [
                clock(column[user][i]) if column is view.arrivals else str(column[user][i])
                for column in used
            ]
            lines.append(" ".join([str(i), *cells]))
    return "\n".join(lines)


def cost_lines(costs: Iterable[tuple[int, int]]) -> str:
    """Lines of ids and calendar costs in the brief style."""
    return "\n".join(f"{flight} {cost}" for flight, cost in costs)


def flight_text(flight: Flight) -> str:
    """`JetBlue | $319 | 6/1 7:19 AM - 6/1 10:19 AM`"""
    return f"{flight.carrier} | ${flight.price} | {span_text(flight.start, flight.end)}"


def event_text(event: Event) -> str:
    """`(3) 6/1 8:00 PM - 6/1 10:00 PM`"""
    return f"({event.importance}) {span_text(event.start, event.end)}"


def span_text(start: int, end: int) -> str:
    """`6/1 7:19 AM - 6/1 10:19 AM`; both ends have their date."""
    return f"{time_text(start)} - {time_text(end)}"


def time_text(minute: int) -> str:
    """`6/1 7:19 AM`"""
    day = FIRST_DAY + timedelta(days=minute // _DAY)
    hour, minutes = divmod(minute % _DAY, 60)
    half = "AM" if hour < 12 else "PM"
    return f"{day.month}/{day.day} {hour % 12 or 12}:{minutes:02d} {half}"


def hour_text(hour: int) -> str:
    """An hour from the first midnight as its day and clock hour: `6/1 7 AM`"""
    day, clock_time, half = time_text(60 * hour).split()
    return f"{day} {clock_time.partition(':')[0]} {half}"


def clock(minute: int) -> str:
    """Hours and minutes from the first midnight: `34:19`"""
    return f"{minute // 60}:{minute % 60:02d}"


def proposal_for_user(
    flight_id: int, costs: Costs, *, flight: Flight, in_conflict: Sequence[Event], brief: bool
) -> str:
    """A user's text about a proposal: its own flight and points."""
    if brief:
        return f"Agent: [propose] {flight_id} {costs.calendar} {costs.price} {costs.arrival}"
    events = "; ".join(event_text(event) for event in in_conflict) or "none"
    return (
        f"Agent: [propose] id {flight_id} | {flight_text(flight)}\n"
        f"Events in conflict: {events}\n"
        f"Your points: calendar {costs.calendar}, price {costs.price}, arrival {costs.arrival}, "
        f"in all {costs.total}\n"
        "You can only answer [accept] or [reject]."
    )


def proposal_for_agent(flights: tuple[Flight, Flight], pair: tuple[int, int]) -> str:
    """The agent's text about its own proposal in the full style: both flights with ids."""
    return "\n".join(
        f"Flight for user {user}: id {i} | {flight_text(flight)}"
        for user, (i, flight) in enumerate(zip(pair, flights, strict=True))
    )


def move_text(act: Act) -> str:
    """A move as its seat writes it."""
    to = "" if act.seat in USERS else f"{'all' if act.room is None else act.room}: "
    return f"{to}[{act.kind}] {act.text}".rstrip()


def message_text(act: Act, *, brief: bool) -> str:
    """The text about a message for the other seat of the room."""
    who = "Agent" if act.seat == AGENT else f"User {act.seat}"
    return attributed(who, act, brief=brief)


def attributed(who: str, act: Act, *, brief: bool) -> str:
    """A move with its player's name in front. Only messages contain text written by a player."""
    if act.kind != "message":
        return f"{who}: [{act.kind}]"
    if brief:
        return f"{who}:\n{indent_lookalikes(act.text, _BRIEF_WORDS)}"
    return f"{who}: [message] {indent_further(act.text)}"


def dropped(*, rejected: bool, messages: bool, brief: bool) -> str:
    """A user's text about a dropped proposal; `rejected` says whether this user rejected it."""
    if brief:
        return BRIEF_OFF_YOURS if rejected and messages else BRIEF_OFF
    text = "The proposal was rejected and is dropped."
    return f"{text} It is your move." if rejected and messages else text


def booked(*, brief: bool) -> str:
    """The text for all seats after both users have accepted."""
    return "" if brief else "Both users accepted. The flights are booked."


def brief_phrases(most_cost: int, *, num_flights: int, hours: Sequence[int]) -> list[str]:
    """Recurring phrases of the brief style; its tokenizer can make each one token.

    `most_cost` is the largest calendar cost, `hours` the hours of arrivals. Ids, hours and numbers
    below 400 are single digits unless ids have two digits. A price of 319 is then ` 31` and `9`, so
    its tens are one token.
    """
    if num_flights > 10:
        ids = [f"{start}{i}" for start in ("\n", " id ") for i in range(num_flights)]
        numbers = [*(f" {hour}:" for hour in hours), *(f" {number}" for number in range(400))]
        proposal = ["all: [propose] user 0:", ", user 1:", " usual", *ids, *numbers]
    else:
        proposal = ["all: [propose] user 0: id ", ", user 1: id "]
    return [
        *(f"[{tag}]" for tag in ("message", "accept", "reject", "off")),
        *proposal,
        "Agent: [propose] ",
        *(f"{user}: [message]" for user in USERS),
        *(f"User {user}:" for user in USERS),
        *(f"Flights {user}" for user in USERS),
        "Agent:",
        "You:",
        " Your move.",
        *(f" -{cost}" for cost in range(1, most_cost + 1)),
    ]


def _price_rule(highest: int, whom: str) -> str:
    if not highest:
        return "does not count."
    return (
        f"a flight that is x % dearer than is usual for {whom} costs x % of a hidden weight from 1 "
        f"to {highest}; a cheaper one earns as much."
    )


def _arrival_rule(highest: int) -> str:
    if not highest:
        return "does not count."
    return (
        "each traveller loses a third of a hidden common weight from 1 to "
        f"{highest} for every whole hour between the two arrivals."
    )
