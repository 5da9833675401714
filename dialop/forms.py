"""The forms with which people make moves, and the pictures on pages, as plain values.

A form makes one move as text; the game still decides whether the move is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dialop.game import Game

Choices = Sequence[tuple[str, str]]  # (what the move says, what the page shows)


@dataclass(frozen=True, slots=True)
class Form:
    """A move: `before`, then the person's text, or one of each `choices` separated by `between`,
    then `after`. With `button` there is nothing to write. `distinct` forbids a repeated choice.
    With `grid` the choices are made on the seat's board: one list per column, with one choice per
    row."""

    name: str
    before: str = ""
    after: str = ""
    hint: str = ""
    start: str = ""
    button: bool = False
    choices: Sequence[tuple[str, Choices]] = ()
    between: str = ", "
    distinct: bool = False
    grid: bool = False


ACCEPT_OR_REJECT = (
    Form("Accept", "[accept]", button=True),
    Form("Reject", "[reject]", button=True),
)


def say(hint: str = "Say something") -> Form:
    """The form of a `[message]`."""
    return Form("Say", "[message] ", hint=hint)


def tag_forms(game: Game) -> list[Form]:
    """A form for each tag of a game, a button for a bare tag; one form for any text if the tags are
    unknown."""
    tags, bare = getattr(game, "tags", ()), getattr(game, "bare", ())
    forms = [
        Form(tag, f"[{tag}]", button=True)
        if tag in bare
        else Form(tag, f"[{tag}] ", hint=f"the words after [{tag}]")
        for tag in tags
    ]
    return forms or [Form("Move", hint="Your move, beginning with its [tag]")]


def worth(
    game: Any, num: int, points_of: Callable[[Any], float | None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The picture of a game without a table: for each of its last `num` moves a note with the
    points of its proposal and their place between the worst (0) and the best (1).

    `points_of(move)` is None for a move that proposes nothing.
    """
    notes: list[dict[str, Any]] = []
    for move in game.moves[len(game.moves) - num :]:
        notes.append({})
        if (points := points_of(move)) is not None:
            place = f"{game.instance.norm(points):.3f} of the way from the worst to the best"
            notes[-1] = {"notes": [[f"worth {points:g} points, {place}"]]}
    return {}, notes
