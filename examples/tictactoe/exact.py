"""How good a policy of `tictactoe.py` is, exactly: an observer that walks the game's tree with the
policy's own probability of each move, so that no game is sampled.

    python -m selfplay.check examples/tictactoe/exact.py:Exact \\
        --config examples/tictactoe/tictactoe.yaml
"""

import math
from dataclasses import dataclass, field
from statistics import fmean

from dialop.tree import InfoSet
from examples.tictactoe.tictactoe import EMPTY, SQUARES, after, best_squares, free, is_over, winner
from selfplay.distributed import broadcast_object
from selfplay.league.exploitability import prompt_of
from selfplay.metrics.observer import Observer


@dataclass
class Node:
    """A position after `path`, reached with the probability `reach` if the other does its part."""

    board: str
    path: tuple
    reach: float = 1.0
    shares: dict = field(default_factory=dict)  # of the policy's moves
    after: dict = field(default_factory=dict)


class Exact(Observer):
    """`not_lost`, the policy's share of games without a loss to perfect play (any of the best
    moves), and `won_by_best`, what a best response is paid, both means over the seats. Positions
    that are not followed count as lost; if none of them were, the figures would be `_other`.
    """

    @dataclass(frozen=True)
    class Options:
        every: int = 64
        """steps between two evaluations"""
        most: int = 400
        """positions after each number of moves that are followed, those likely ones"""

    def __init__(self, config, world, options=None):
        super().__init__(config, world, options)
        (self.deal,) = config.game.kit.generate(config.game.options, seed=0, num=1)
        self.prompts = {}

    def on_step(self, step):
        if step.number % self.options.every or not step.complete:
            return None
        found, masses = {}, []
        for name, replies, worth in (("not_lost", best_squares, kept), ("won_by_best", free, paid)):
            values = {-1: 0.0, 1: 0.0}
            for seat in (0, 1):
                root, mass = self.walk(seat, replies, step.policy)
                masses.append(mass)
                for rest in values:
                    values[rest] += worth(root, seat, rest) / 2
            found |= {name: values[-1], f"{name}_other": values[1]}
        return found | {"legal_mass": min(masses)}

    def walk(self, seat, replies, policy):
        """The tree of the policy in this seat against these replies, and 1 minus the largest
        probability to write something that is no move."""
        root, mass = Node(EMPTY, ()), 1.0
        level = [root]
        while level:
            mine = [node for node in level if len(node.path) % 2 == seat]
            mine = sorted(mine, key=lambda node: -node.reach)[: self.options.most]
            for node, (shares, listed) in zip(mine, self.read(seat, mine, policy), strict=True):
                node.shares, mass = shares, min(mass, 1.0 - node.reach * (1.0 - listed))
            below = []
            for node in mine or level:
                for square in free(node.board) if mine else replies(node.board):
                    path = (*node.path, f"[move] {SQUARES[square]}")
                    reach = node.reach * node.shares.get(square, 1.0)
                    node.after[square] = Node(after(node.board, square), path, reach)
                below += [each for each in node.after.values() if not is_over(each.board)]
            level = below
        return root, mass

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
        if texts and self.world.rank == 0:
            scores = policy.engine.score(texts, temperature=self.config.rollout.temperature)()
        scores = broadcast_object(scores, self.world) or []
        logs = (math.fsum(each[-end:]) for each, end in zip(scores, ends, strict=True))
        for node in nodes:
            found = {square: math.exp(next(logs)) for square in free(node.board)}
            mass = math.fsum(found.values())
            yield {square: share / mass for square, share in found.items()}, mass


def kept(node, seat, rest):
    """How often the seat does not lose, if the best replies of the other are equally likely."""
    below = [kept(each, seat, rest) for each in node.after.values()]
    if is_over(node.board):
        return float(won(node, seat) >= 0)
    if node.shares:
        return math.fsum(
            share * each for share, each in zip(node.shares.values(), below, strict=True)
        )
    return fmean(below) if below else float(rest > 0)


def paid(node, seat, rest):
    """What a best response to the seat is paid."""
    below = [paid(each, seat, rest) for each in node.after.values()]
    if is_over(node.board):
        return float(-won(node, seat))
    if node.shares:
        return math.fsum(
            share * each for share, each in zip(node.shares.values(), below, strict=True)
        )
    return max(below) if below else float(-rest)


def won(node, seat):
    return winner(node.board) * (1 if seat == 0 else -1)
