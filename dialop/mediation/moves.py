"""Reads moves: recipient, tag and content, and the text of a proposal.

A user writes `[message] ...`, `[accept]` or `[reject]`. The agent writes `0: [message] ...`,
`1: [message] ...` or `all: [propose] user 0: id A, user 1: id B`. Case, spaces and line breaks
around these parts do not matter.
"""

from __future__ import annotations

import re

from dialop.game import PlayerError
from dialop.mediation.records import Pair

ALL = "all"
_RECIPIENT = re.compile(r"\s*(?:to\s+)?(?:user\s*)?([01]|all)\s*:", re.IGNORECASE)
_CHOICE = re.compile(
    r"user\s*([01])\s*:?\s*(?:flight\s*)?(?:id\s*)?[:#]?\s*([0-9]{1,9})\b", re.IGNORECASE
)
_FILLER = re.compile(r"(?:[\s,;.]|\band\b)*", re.IGNORECASE)
# Before the tag in a line that starts a move of the agent.
TO = r"(?:to[ \t]+)?(?:user[ \t]*)?(?:[01]|all)[ \t]*:\s*"


def split_recipient(text: str) -> tuple[str | None, str]:
    """The agent's recipient ("0", "1" or "all", None without one) and the text after its colon."""
    match = _RECIPIENT.match(text)
    if match is None:
        return None, text
    return match[1].lower(), text[match.end() :]


def parse_proposal(text: str, num_flights: Pair) -> Pair:
    """The flight ids in a proposal's text, by user.

    Each user must be named exactly once, in any order, without any other text.

    Raises:
        PlayerError: for any other text (kind bad_proposal), or an id that does not exist
            (no_flight).
    """
    found: dict[int, int] = {}
    rest, at = [], 0
    for match in _CHOICE.finditer(text):
        rest.append(text[at : match.start()])
        at = match.end()
        user = int(match[1])
        if user in found:
            raise PlayerError("bad_proposal", f"user {user} is named twice; {_FORM}")
        found[user] = int(match[2])
    rest.append(text[at:])
    if len(found) != 2 or any(_FILLER.fullmatch(part) is None for part in rest):
        raise PlayerError("bad_proposal", _FORM)
    for user, flight in sorted(found.items()):
        if flight >= num_flights[user]:
            last = num_flights[user] - 1
            raise PlayerError("no_flight", f"user {user} has the flights 0 to {last}, not {flight}")
    return found[0], found[1]


def render_proposal(pair: Pair) -> str:
    """A proposal's content in canonical form."""
    return f"user 0: id {pair[0]}, user 1: id {pair[1]}"


_FORM = "write a proposal as `all: [propose] user 0: id A, user 1: id B`"
