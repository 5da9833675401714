"""People's recorded games as players to imitate: their moves in this game's order of turns.

People could write several messages in a row and write while a proposal was pending; here a seat
makes one move a turn and answers a proposal at once. A message that this order has no place for is
left out, and the other seat's next move, which may answer it, is context without imitation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dialop.game import Lesson, Script
from dialop.logged import Rules
from dialop.matching.board import Action, MatchingInstance, MatchingView
from dialop.matching.game import MatchingGame
from dialop.matching.proposal import render_proposal
from dialop.matching.texts import move_text
from dialop.starts import RecordedGame


@dataclass(frozen=True, slots=True)
class PlayedMove:
    """A move as text. `imitated` is False for one that may answer words that were left out."""

    text: str
    imitated: bool


@dataclass(frozen=True, slots=True)
class Person:
    """A scripted player that repeats a recorded game: move n of `moves` is its n-th legal move.

    `moves` are both seats'; a seat is asked for its own only.
    """

    moves: tuple[PlayedMove, ...]
    seed: int = 0

    def act(self, view: MatchingView) -> str:
        """The recorded move at this point of the game."""
        return self.lesson(view).text

    def lesson(self, view: MatchingView) -> Lesson:
        """The same move; one that is not imitated is a detour as a whole."""
        move = self.moves[len(view.log)]
        return Lesson(move.text, () if move.imitated else ((0, len(move.text)),))

    def reseeded(self, seed: int) -> Person:
        """The same player: it draws nothing."""
        return self


@dataclass(frozen=True, slots=True)
class PeoplesGame:
    """A recorded game in this game's order of turns. `left_out` counts the entries of the log that
    have no place in it."""

    instance: MatchingInstance
    moves: tuple[PlayedMove, ...]
    left_out: int

    @property
    def scripts(self) -> tuple[Script, Script]:
        """The players of both seats."""
        return Person(self.moves), Person(self.moves)


def peoples_game(recorded: RecordedGame) -> PeoplesGame | None:
    """The recorded game as moves of both seats; None for a log that cannot be read with the roster
    (`moves_from_record`)."""
    log = recorded.moves
    if not log:
        return None
    game = MatchingGame(recorded.board, Rules())
    moves: list[PlayedMove] = []
    left_out = 0
    unheard = [False, False]  # whether the seat's next move may answer words that were left out
    for action, following in zip(log, [*log[1:], None], strict=True):
        text = _text(action, recorded.board)
        if text and not _taken_back(action, following) and _is_legal(game, action, text):
            moves.append(PlayedMove(text, imitated=not unheard[action.seat]))
            unheard[action.seat] = False
        else:
            left_out += 1
            unheard[1 - action.seat] |= action.kind == "message"
    return PeoplesGame(recorded.board, tuple(moves), left_out)


def board_digest(board: MatchingInstance) -> str:
    """A name of a table and of what the seats see of it, whatever file it came from."""
    return hashlib.sha256(repr((board.table, board.masks)).encode()).hexdigest()[:16]


def _taken_back(action: Action, following: Action | None) -> bool:
    """Whether the next entry is the same seat's proposal: it takes the turn of this message or
    replaces this proposal."""
    if following is None or following.seat != action.seat:
        return False
    return following.kind == "propose" and action.kind in ("message", "propose")


def _is_legal(game: MatchingGame, action: Action, text: str) -> bool:
    """Make the move if it is the seat's turn and the rules allow it."""
    return game.seat_to_move == action.seat and game.step(action.seat, text).error is None


def _text(action: Action, board: MatchingInstance) -> str:
    """The move in its canonical form; "" for an empty message."""
    content = action.text.strip()
    if action.kind == "message" and not content:
        return ""
    if action.kind == "propose":
        assert action.pairs is not None
        content = render_proposal(action.pairs, board.reviewers, papers=board.papers)
    return move_text(action.kind, content)
