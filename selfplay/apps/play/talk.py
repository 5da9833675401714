"""A seat's texts by speaker, and the person's own attempted moves, for the play page."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from dialop.forms import Form
from dialop.shown import printable

# A move as a seat writes it, optionally with its addressee, and the first line of another's move.
_MOVE = re.compile(r"\s*(?:(\w+)\s*:)?\s*\[\s*(\w+)\s*\]\s*(.*)", re.DOTALL)
_SPOKEN = re.compile(r"([A-Za-z][\w ]*):(?: \[(\w+)\] ?(.*))?")


def tags_of(forms: Sequence[Form]) -> set[str]:
    """The tags of the moves that these forms make."""
    return {found[2] for form in forms if (found := _MOVE.fullmatch(form.before))}


def own_move(text: str, *, rooms: Sequence[str], tags: Collection[str]) -> dict[str, Any]:
    """The person's attempted move, split into its kind, one of `tags`, and its text; `room` is
    absent if the move is for all."""
    found = _MOVE.fullmatch(text)
    known = found and found[2].lower() in tags and (rooms or not found[1])
    whom, kind, words = found.groups() if found and known else (None, "", text)
    room = {"room": int(whom)} if whom in [str(i) for i in range(len(rooms))] else {}
    return {"kind": kind, "text": printable(words), **room}


def spoken(observation: str, names: Sequence[str], *, rooms: Sequence[str]) -> list[dict[str, Any]]:
    """A seat's observation as the moves of others and the game's texts, in order.

    A game writes "Agent: [message] …" or "seat 1: [message] …"; further lines of a player's text
    are indented, and other lines are the game's. After a line with only "Agent:", the lines up to
    one with a tag are the player's. The game's lines after a move are its `note`; before any move
    they are an entry without a `seat`.
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
