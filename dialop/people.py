"""Recorded human games for imitation: their moves in a game's order of turns.

People could write several messages in a row and write while a proposal was pending; here a seat
makes one move per turn and answers a proposal at once. Messages that do not fit this order are left
out. The next move of a seat that read such a message may answer it, so it is context and not
imitated.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dialop.game import Game, Lesson
from dialop.starts import RecordedGame


@dataclass(frozen=True, slots=True)
class PlayedMove:
    """A seat's move as text. `imitated` is False if it may answer an omitted message."""

    seat: int
    text: str
    imitated: bool


@dataclass(frozen=True, slots=True)
class Person:
    """A scripted player that repeats a seat's moves in a recorded game, in order."""

    seat: int
    moves: tuple[PlayedMove, ...]
    seed: int = 0

    def act(self, view: Any) -> str:
        """The move at this point of the recorded game."""
        return self.lesson(view).text

    def lesson(self, view: Any) -> Lesson:
        """The same move; if it is not imitated, as one detour."""
        move = self.moves[sum(made.seat == self.seat for made in view.log)]
        return Lesson(move.text, () if move.imitated else ((0, len(move.text)),))

    def reseeded(self, seed: int) -> Person:
        """The same player: it makes no random draws."""
        return self


@dataclass(frozen=True, slots=True)
class PeoplesGame:
    """A recorded game in this game's order of turns. `left_out` counts the log entries that do not
    fit this order."""

    instance: Any
    moves: tuple[PlayedMove, ...]
    left_out: int

    def script(self, seat: int) -> Person:
        """The player of a seat."""
        return Person(seat, tuple(move for move in self.moves if move.seat == seat))


def peoples_games(
    recorded: Iterable[RecordedGame],
    new_game: Callable[[Any], Game],
    text_of: Callable[[Any, Any], str],
    rooms: Sequence[Sequence[int]] = ((0, 1),),
) -> list[PeoplesGame]:
    """The recorded games as moves of all seats, without games whose log cannot be read.

    `text_of(move, instance)` is a logged move as its seat would write it. `rooms` lists the seats
    of each room; a move whose `room` is None is made in all rooms.
    """
    return [_ordered(each, new_game(each.board), text_of, rooms) for each in recorded if each.moves]


def as_read(text: str) -> str:
    """A text without invisible differences: after NFKC, case-folded, with single blanks and without
    format characters, such as a soft hyphen."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join("".join(c for c in folded if unicodedata.category(c) != "Cf").split())


def digest(*parts: object) -> str:
    """A digest of the players' view of an instance, independent of its file."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _ordered(
    recorded: RecordedGame,
    game: Game,
    text_of: Callable[[Any, Any], str],
    rooms: Sequence[Sequence[int]],
) -> PeoplesGame:
    """Play the log in the game's order. The seat to move makes the first remaining move in the log
    of its rooms; a move by another seat or an invalid move is left out."""
    log, moves = list(recorded.moves), list[PlayedMove]()
    unheard = set[int]()  # seats whose next move may answer an omitted message

    def rooms_of(move: Any) -> set[int]:
        room = getattr(move, "room", 0)
        return set(range(len(rooms))) if room is None else {room}

    while (seat := game.seat_to_move) is not None:
        own = {number for number, seats in enumerate(rooms) if seat in seats}
        left = [move for move in log if own & rooms_of(move)]
        if not left:
            break
        move = left[0]
        log.remove(move)
        following = [later for later in log if rooms_of(move) & rooms_of(later)]
        text = text_of(move, recorded.board)
        fits = move.seat == seat and not _taken_back(move, following[:1])
        if fits and game.step(seat, text).error is None:
            moves.append(PlayedMove(seat, text, imitated=seat not in unheard))
            unheard.discard(seat)
        elif move.kind == "message":
            unheard |= {each for room in rooms_of(move) for each in rooms[room]} - {move.seat}
    return PeoplesGame(recorded.board, tuple(moves), len(recorded.moves) - len(moves))


def _taken_back(move: Any, following: Sequence[Any]) -> bool:
    """Whether the next entry is a proposal by the same seat, which then replaces this message or
    proposal."""
    return move.kind in ("message", "propose") and any(
        later.kind == "propose" and later.seat == move.seat for later in following
    )
