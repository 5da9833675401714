"""Demonstrations for prompts: finished games of scripted players, each from the view of one seat.
A prompt shows them before the real game. Knows no rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from dialop.game import Game, Script

NEW_GAME = "This game is over. A new game begins, with another partner."
_MOST_MOVES = 100


def demonstrated(
    games: Sequence[tuple[Game, Sequence[Script]]],
) -> tuple[tuple[tuple[str, str], ...], str]:
    """`Prompt.earlier` and `Prompt.between` of these new games, each with its seats' players.

    The first game is shown from the view of the seat that moves first, the second from that of the
    other seat, and so on. Raises ValueError if a game does not end or a move is refused.
    """
    earlier: list[tuple[str, str]] = []
    between = ""
    for number, (game, scripts) in enumerate(games):
        first = game.seat_to_move
        assert first is not None
        shown = (first + number) % game.num_seats
        unread = [""] * game.num_seats
        opening = game.prompt(shown).user
        for _ in range(_MOST_MOVES):
            seat = game.seat_to_move
            if seat is None:
                break
            text = scripts[seat].act(game.view(seat))
            if seat == shown:
                parts = (between, opening, unread[seat])
                earlier.append(("\n".join(part for part in parts if part), text))
                between = opening = unread[seat] = ""
            step = game.step(seat, text)
            if step.error is not None:
                raise ValueError(f"a demonstration must hold legal moves, got {step.error}")
            for other, heard in enumerate(step.observations):
                unread[other] = "\n".join(part for part in (unread[other], heard) if part)
        else:
            raise ValueError(f"a demonstration must end within {_MOST_MOVES} moves")
        between = "\n".join(part for part in (unread[shown], NEW_GAME) if part)
    return tuple(earlier), between
