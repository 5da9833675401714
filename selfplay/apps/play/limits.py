"""How much is left before a limit ends a running game, and how much a move takes, in plain words.

`called` are the seats' names for the person who reads the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dialop.game import Game
from selfplay.config import RolloutConfig
from selfplay.engines.base import Completion, Generate, Request
from selfplay.rollout.episode import Position
from selfplay.rollout.players import FrozenPlayer, Move, PartnerPlayer, PolicyPlayer


@dataclass(frozen=True, slots=True)
class Left:
    """How much is left of a game, each as (left, limit); at 0 left the game ends.

    `moves` are the valid moves of all seats, `tries` the invalid moves in a row, `tokens` the
    tokens that a model of this process can still read and write, by its seat.
    """

    moves: tuple[int, int]
    tries: tuple[int, int]
    tokens: dict[int, tuple[int, int]]


def left_of(position: Position, rollout: RolloutConfig) -> Left:
    """How much is left of a running game, after each model has read its next prompt."""
    most, tries = rollout.max_turns, rollout.max_retries + 1
    read = _read(position)
    tokens = {seat: (max(0, room - num), room) for seat, (num, room) in read.items()}
    return Left((most - position.num_legal, most), (tries - position.num_refused, tries), tokens)


def taken_by(position: Position, text: str) -> dict[int, int]:
    """How many tokens of this move of the seat to move each model would read; {} if the move ends
    the game."""
    after, before = position.fork(), _read(position)
    seat = after.setup.game.seat_to_move
    assert seat is not None
    players = list(after.setup.players)
    players[seat] = Says(text)
    after.setup = replace(after.setup, players=tuple(players))
    with suppress(StopIteration):
        after.turn(ask_no_model).send(None)  # `Says` awaits nothing
    if after.ended is not None:
        return {}
    return {seat: num - before[seat][0] for seat, (num, _) in _read(after).items()}


def left_text(left: Left, called: Sequence[str], *, may_propose: bool) -> list[str]:
    """What is left, in short lines. `may_propose` says that the current move may be a proposal,
    which needs one more move for its answer."""
    (moves, most), (tries, _) = left.moves, left.tries
    hint = {
        1: "; a proposal can no longer be answered",
        2: ": a proposal and its answer, and no message",
    }
    together = f"of {'both' if len(called) == 2 else 'all'} players together"
    lines = [f"{moves} of {most} moves left, {together}{hint.get(moves, '') * may_propose}"]
    again = f"{tries} invalid moves in a row end" if tries > 1 else "one more invalid move ends"
    lines.append(f"{again} the game")
    for seat, (room, limit) in left.tokens.items():
        lines.append(f"{the(called[seat])} can read and write {room:,} more tokens of {limit:,}")
    return lines


def taken_text(left: Left, taken: dict[int, int], called: Sequence[str]) -> tuple[str, bool]:
    """How much of the tokens left a move takes, "" for nothing, and whether it ends the game
    because it leaves none for an answer."""
    lines, ends = [], False
    for seat, num in taken.items():
        room, who = left.tokens[seat][0], the(called[seat])
        if num > 0:
            lines.append(f"This takes {num:,} of the {room:,} tokens that {who} can still read")
            lines[-1] += ", so it cannot answer and the game ends." if num >= room else "."
            ends = ends or num >= room
    return " ".join(lines), ends


def the(name: str) -> str:
    """The name of a seat within a sentence."""
    return name if name.startswith("you") or name[-1].isdigit() else f"the {name}"


def _read(position: Position) -> dict[int, tuple[int, int]]:
    """For each seat of a model: the tokens of its next prompt, and its limit for the game.

    A player that a run asks whether it is `ready` reads elsewhere, in a program.
    """
    read = {}
    for seat, player in enumerate(position.setup.players):
        policy = player.policy if isinstance(player, FrozenPlayer) else player
        if isinstance(policy, PolicyPlayer) and not hasattr(policy, "ready"):
            policy = policy.fork()
            with suppress(_Asked, StopIteration):
                unread = position.unread[seat]
                policy.move(position.setup.game, seat, unread, ask_no_model).send(None)
            read[seat] = len(policy.transcript.context()), policy.max_game_tokens
    return read


class _Asked(Exception):
    """A model has read its prompt."""


async def ask_no_model(request: Request) -> Completion:
    """The `generate` of games without an engine."""
    raise _Asked


class Says(PartnerPlayer):
    """A player who makes one move."""

    name = "person"

    def __init__(self, text: str) -> None:
        self._text = text

    async def move(self, game: Game, seat: int, observation: str, generate: Generate) -> Move:
        return Move(self._text, complete=True, num_tokens=0)

    def fork(self, *names: object) -> Says:
        return self
