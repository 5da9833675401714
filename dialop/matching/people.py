"""Recorded human games to imitate: their moves in this game's order of turns.

People could write several messages in a row and write while a proposal was pending; here a seat
makes one move per turn and answers a proposal at once. Messages that do not fit this order are left
out. The other seat's next move may answer such a message, so it is context and not imitated.
"""

from __future__ import annotations

import hashlib

from dialop.logged import Rules
from dialop.matching.board import Action, MatchingInstance
from dialop.matching.game import MatchingGame
from dialop.matching.proposal import render_proposal
from dialop.matching.texts import move_text
from dialop.starts import PeoplesGame, PlayedMove, RecordedGame


def peoples_game(recorded: RecordedGame) -> PeoplesGame | None:
    """The recorded game as moves of both seats; None for a log that cannot be read with the roster
    (`moves_from_record`)."""
    log = recorded.moves
    if not log:
        return None
    game = MatchingGame(recorded.board, Rules())
    moves: list[PlayedMove] = []
    left_out = 0
    unheard = [False, False]  # whether the seat's next move may answer a message left out
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
    """A digest of a table and of the cells that each seat sees, independent of the file."""
    return hashlib.sha256(repr((board.table, board.masks)).encode()).hexdigest()[:16]


def _taken_back(action: Action, following: Action | None) -> bool:
    """Whether the next entry is a proposal of the same seat, which then takes the place of this
    message or proposal."""
    if following is None or following.seat != action.seat:
        return False
    return following.kind == "propose" and action.kind in ("message", "propose")


def _is_legal(game: MatchingGame, action: Action, text: str) -> bool:
    """Try the move; return whether it is the seat's turn and the rules allow the move."""
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
