"""The page's forms for the moves that a person may make now, and the seat's texts by speaker.

A form makes one move as text. The game still decides whether the move is legal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dialop.collab.task import ASSISTANT, CollabView
from dialop.game import Game
from dialop.matching.board import MatchingView
from dialop.mediation.records import USERS, AgentView, UserView
from dialop.mediation.texts import flight_text
from dialop.planning.board import AGENT, PlanningView
from dialop.shown import printable

_SEARCH = (
    "Search(fields=[price, rating], filters=[category == cafe], sort_by=[rating desc], limit=5)"
)
_EMPTY = ("NULL", "leave it empty")
# A move as a seat writes it, perhaps with whom it is for, and a line that begins another's move.
_MOVE = re.compile(r"\s*(?:(\w+)\s*:)?\s*\[\s*(\w+)\s*\]\s*(.*)", re.DOTALL)
_SPOKEN = re.compile(r"([A-Za-z][\w ]*):(?: \[(\w+)\] ?(.*))?")

Choices = list[tuple[str, str]]  # (what the move says, what the page shows)


@dataclass(frozen=True, slots=True)
class Form:
    """A move: `before`, then the person's text, or one of each `choices` with ", " between, then
    `after`. With `button` there is nothing to write. `distinct` forbids a choice made twice."""

    name: str
    before: str = ""
    after: str = ""
    hint: str = ""
    start: str = ""
    button: bool = False
    choices: tuple[tuple[str, Choices], ...] = ()
    distinct: bool = False


_ANSWERS = (Form("Accept", "[accept]", button=True), Form("Reject", "[reject]", button=True))


def forms_of(game: Game, view: Any) -> list[dict[str, Any]]:
    """The forms of a seat whose move it is, as plain values."""
    return [asdict(form) for form in _forms(game, view)]


def _forms(game: Game, view: Any) -> Sequence[Form]:
    match view:
        case MatchingView() | UserView() | PlanningView() if game.answer_due:
            return _ANSWERS
        case MatchingView():
            return (
                [Form("Say", "[message] ", hint="Say something")] if view.options.messages else ()
            )
        case PlanningView():
            forms = (
                [Form("Say", "[message] ", hint="Say something")] if view.options.messages else []
            )
            if view.seat != AGENT:
                return forms
            if view.options.search:
                forms.append(Form("Search", "[tool] ", start=_SEARCH, hint="Search(…)"))
            sites = [(name, name) for name in view.names]
            if view.options.messages:
                sites.append(_EMPTY)
            slots = tuple((f"site {i + 1}", sites) for i in range(view.slots))
            return [*forms, Form("Propose", "[propose] [", "]", choices=slots, distinct=True)]
        case UserView():
            return [Form("Say", "[message] ", hint="Only the agent reads this")]
        case AgentView():
            users = [(f"user {user}", _flights(view, user)) for user in USERS]
            rooms = [
                Form(f"To {name}", f"{user}: [message] ", hint=f"Only {name} reads this")
                for user, (name, _) in enumerate(users)
            ]
            propose = Form("Propose", "all: [propose] ", choices=tuple(users))
            return [*(rooms if view.options.messages else ()), propose]
        case CollabView():
            end = ("Answer", "[answer] ") if view.seat == ASSISTANT else ("End", "[end] ")
            return Form("Say", hint="Say something"), Form(*end, button=view.seat != ASSISTANT)
    tags = getattr(game, "tags", ())
    return [Form(tag, f"[{tag}] ", hint=f"the words after [{tag}]") for tag in tags] or [
        Form("Move", hint="Your move, beginning with its [tag]")
    ]


def _flights(view: AgentView, user: int) -> Choices:
    """The flights of a user, each as a proposal names it and as the page shows it."""
    texts = [flight_text(flight) for flight in view.flights[user]] if view.flights else None
    return [
        (f"user {user}: id {i}", f"{i}: {texts[i]}" if texts else f"flight {i}")
        for i in range(len(view.prices[user]))
    ]


def rooms_of(view: Any) -> list[str]:
    """The names of the private rooms that a seat talks in, by number; none where all share one."""
    return [f"user {user}" for user in USERS] if isinstance(view, AgentView) else []


def tags_of(forms: Sequence[dict[str, Any]]) -> set[str]:
    """The tags of the moves that these forms make."""
    return {found[2] for form in forms if (found := _MOVE.fullmatch(form["before"]))}


def own_move(text: str, *, rooms: Sequence[str], tags: Collection[str]) -> dict[str, Any]:
    """A try of the person at a move, told apart into its kind, one of `tags`, and text; `room` is
    absent where the move is for all."""
    found = _MOVE.fullmatch(text)
    known = found and found[2].lower() in tags and (rooms or not found[1])
    whom, kind, words = found.groups() if found and known else (None, "", text)
    room = {"room": int(whom)} if whom and whom.isdigit() and int(whom) < len(rooms) else {}
    return {"kind": kind, "text": printable(words), **room}


def spoken(observation: str, names: Sequence[str], *, rooms: Sequence[str]) -> list[dict[str, Any]]:
    """What a seat reads, as the moves of others and the game's own texts, in order.

    A game writes "Agent: [message] …" or "seat 1: [message] …"; the further lines of a player's
    text are indented, and lines that are not are the game's. In the brief style of mediation
    "Agent:" stands alone, and lines up to one with a tag are the player's. The game's lines after a
    move are its `note`; before any move they are an entry without a `seat`.
    """
    named = {name.lower(): seat for seat, name in enumerate(names)}
    numbered = {f"seat {seat}": seat for seat in range(len(names))}
    entries: list[dict[str, Any]] = []
    alone = False
    for line in printable(observation).splitlines():
        found = _SPOKEN.fullmatch(line)
        seats = named if alone else numbered | named
        seat = seats.get(found[1].lower()) if found else None
        if found and seat is not None:
            alone = found[2] is None
            kind, text = found[2] or "message", found[3] or ""
            entry = {"seat": seat, "kind": kind, "text": text, "note": ""}
            entries.append(entry | ({"room": seat} if seat < len(rooms) else {}))
        elif alone and not line.startswith("["):
            entries[-1]["text"] = f"{entries[-1]['text']}\n{line.strip()}".strip()
        elif not entries:
            entries.append({"text": "", "note": line})
        elif line.startswith("  ") and "seat" in entries[-1] and not entries[-1]["note"]:
            entries[-1]["text"] += f"\n{line.strip()}"
        else:
            entries[-1]["note"] += f"\n{line}"
    for entry in entries:
        entry["note"] = entry["note"].strip("\n")
    return entries
