"""How good a policy of `tictactoe.py` is, exactly: an observer that walks the game's tree with the
policy's own probability of each move, so that no game is sampled.

    python -m selfplay.check examples/tictactoe/exact.py:Exact \\
        --config examples/tictactoe/tictactoe.yaml
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from statistics import fmean

from dialop.tree import InfoSet
from examples.tictactoe.tictactoe import EMPTY, SQUARES, after, best_squares, free, is_over, winner
from selfplay.distributed import broadcast_object
from selfplay.league.exploitability import prompt_of
from selfplay.metrics.observer import Observer

BATCH = 256  # positions that are read at once


@dataclass(eq=False)
class Node:
    """A position after `path`, and the `ends` between which its value lies; `shares` are the
    policy's moves, once they are read."""

    board: str
    path: tuple
    ends: tuple
    above: "Node | None" = None
    shares: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Opponent:
    """Whoever plays the other seat: the squares that it may take, the value of its move by those of
    its squares, and of a game by what the policy is paid."""

    name: str
    replies: Callable
    joined: Callable
    worth: Callable


OPPONENTS = (
    Opponent("not_lost", best_squares, fmean, lambda won: float(won >= 0)),
    Opponent("won_by_best", free, max, lambda won: float(-won)),
)


@cache
def bounds(board, seat, other):
    """The value of a position if the policy plays the worst moves from here, and the best ones."""
    if is_over(board):
        return (other.worth(winner(board) * (1, -1)[seat]),) * 2
    mine = mover(board) == seat
    squares = free(board) if mine else other.replies(board)
    lows, highs = zip(*(bounds(after(board, each), seat, other) for each in squares), strict=True)
    return (min(lows), max(highs)) if mine else (other.joined(lows), other.joined(highs))


class Exact(Observer):
    """`not_lost`, the policy's share of games without a loss to perfect play (any of the best
    moves), and `won_by_best`, what a best response is paid, both means over the seats.

    Only positions that still matter are read: those to which a best response may lead, likely ones
    first, until its value is known to `within`. What is left counts as the worst that the policy
    can play there, and in `_other` as the best.
    """

    @dataclass(frozen=True)
    class Options:
        every: int = 64
        """steps between two evaluations"""
        within: float = 0.01
        """how far the two ends of a value may lie apart"""
        most: int = 20_000
        """positions that are read for each value and seat"""

    def __init__(self, config, world, options=None):
        super().__init__(config, world, options)
        (self.deal,) = config.game.kit.generate(config.game.options, seed=0, num=1)
        self.prompts = {}

    def on_step(self, step):
        if step.number % self.options.every or not step.complete:
            return None
        found, masses = {}, []
        for other in OPPONENTS:
            of_seats = [self.value(seat, other, step.policy) for seat in (0, 1)]
            if None in of_seats:  # the engine failed; the next rollout restarts it
                return None
            lows, highs, listed = zip(*of_seats, strict=True)
            ends = sorted((fmean(lows), fmean(highs)), reverse=other.joined is max)
            found |= {other.name: ends[0], f"{other.name}_other": ends[1]}
            masses += listed
        return found | {"legal_mass": min(masses)}

    def value(self, seat, other, policy):
        """The ends between which the policy's value in this seat against this opponent lies, and 1
        minus the largest probability to write something that is no move; None without an answer of
        the engine."""
        root, mass, num = Node(EMPTY, (), bounds(EMPTY, seat, other)), 1.0, 0
        while True:
            left = sorted(unread(root, seat, other), key=lambda each: -each[0])
            left = left[: min(BATCH, self.options.most - num)]
            if root.ends[1] - root.ends[0] <= self.options.within or not left:
                return *root.ends, mass
            nodes = [node for _, _, node in left]
            of_nodes = [*self.read(seat, nodes, policy)]
            if not of_nodes:
                return None
            for (_, reach, node), (shares, listed) in zip(left, of_nodes, strict=True):
                node.shares, mass = shares, min(mass, 1.0 - reach * (1.0 - listed))
                grow(node, shares, seat, other)
                settle(node, other)
            num += len(nodes)

    def read(self, seat, nodes, policy):
        """For each position the policy's probability of each square, and of all together."""
        texts, ends, rendering = [], [], policy.rendering
        for node in nodes:
            moves = tuple(f"[move] {SQUARES[square]}" for square in free(node.board))
            if node.path not in self.prompts:
                info = InfoSet("", seat, "", moves, self.deal, node.path)
                self.prompts[node.path] = prompt_of(info, self.config, rendering)
            for ids in map(rendering.action_ids, moves):
                texts.append([*self.prompts[node.path], *ids])
                ends.append(len(ids))
        scores = None
        if self.world.rank == 0:
            scores = policy.engine.score(texts, temperature=self.config.rollout.temperature)()
        scores = broadcast_object(scores, self.world)
        if scores is None:
            return
        logs = (math.fsum(each[-end:]) for each, end in zip(scores, ends, strict=True))
        for node in nodes:
            found = {square: math.exp(next(logs)) for square in free(node.board)}
            mass = math.fsum(found.values())
            yield {square: share / mass for square, share in found.items()}, mass


def grow(node, squares, seat, other):
    for square in squares:
        board, path = after(node.board, square), (*node.path, f"[move] {SQUARES[square]}")
        node.after[square] = Node(board, path, bounds(board, seat, other), node)


def settle(node, other):
    """The ends of this position, and of those above it, by those of the positions after it."""
    while node is not None:
        below = zip(*(each.ends for each in node.after.values()), strict=True)
        if node.shares:
            shares = node.shares.values()
            node.ends = tuple(math.fsum(map(mul, shares, values)) for values in below)
        else:
            node.ends = tuple(map(other.joined, below))
        node = node.above


def unread(node, seat, other, weight=1.0, reach=1.0):
    """The positions whose moves are still to be read: how much each may change the root's value,
    how likely the policy's own moves lead to it, and its node."""
    mine = mover(node.board) == seat
    if node.ends[0] == node.ends[1]:
        return
    if mine and not node.shares:
        yield weight * (node.ends[1] - node.ends[0]), reach, node
        return
    if not node.after:
        grow(node, other.replies(node.board), seat, other)
    below = node.after
    if not mine and other.joined is max:
        best = max(below, key=lambda square: below[square].ends[1])
        below = {best: below[best]}
    for square, each in below.items():
        share = node.shares[square] if mine else 1.0
        part = share if mine else 1.0 / len(below)
        yield from unread(each, seat, other, weight * part, reach * share)


def mover(board):
    return board.count("X") - board.count("O")
