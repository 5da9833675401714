"""What pages show of a collaboration: the forms of moves and the talk."""

from __future__ import annotations

from dialop.collab.game import CollabGame
from dialop.collab.task import ASSISTANT
from dialop.forms import Form


def forms(game: CollabGame, seat: int) -> list[Form]:
    """A message, and the assistant's answer or the user's end."""
    assists = seat == ASSISTANT
    end = ("Answer", "[answer] ") if assists else ("End", "[end] ")
    return [Form("Say", hint="Say something"), Form(*end, button=not assists)]


def talk(game: CollabGame, seat: int) -> list[tuple[int, str, str]]:
    """All moves: both seats know them."""
    return [(move.seat, move.kind, move.text) for move in game.view(seat).log]
