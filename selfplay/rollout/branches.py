"""Branch points: sibling turns from one state of a game, each continued to the end.

A running game is forked before chosen turns, and the forks are played in the same batches as all
other games. Draws of a fork are named (..., episode, "branch", turn, sibling, continuation), so the
game itself is exactly what it would be without branches. Whether a turn becomes a branch point
never depends on what follows it; otherwise the siblings would be biased samples of the policy.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from selfplay.engines.base import Generate
from selfplay.rollout.episode import VOID, BranchPoint, Episode, Position, play_turns
from selfplay.rollout.options import BranchConfig

DEFAULTS = BranchConfig()


async def play_branched(
    position: Position, generate: Generate, branch: BranchConfig = DEFAULTS
) -> Episode:
    """Play a game and its branches to their ends.

    Sibling 0 of a branch point is the turn that the game itself took, and its continuation 0 is the
    game itself. A turn that ends the game has no other continuation.
    """
    points: list[BranchPoint] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            branches = _Branches(branch, generate, tasks)
            while position.ended is None:
                if _is_branch_point(position, branch, len(points)):
                    points.append(await branches.take_turn(position))
                else:
                    await position.turn(generate)
    except BaseExceptionGroup as errors:  # of this game or of one of its branches
        raise errors.exceptions[0] from None
    # Drop branch points where the seat had no tokens left for a turn.
    taken = tuple(point for point in points if point.turn < len(position.turns))
    return replace(position.episode(), branches=taken)


@dataclass(frozen=True, slots=True)
class _Branches:
    """The forks of one game, each played in its own task."""

    branch: BranchConfig
    generate: Generate
    tasks: asyncio.TaskGroup

    async def take_turn(self, position: Position) -> BranchPoint:
        """Start the siblings of the next turn, take the turn, then start its continuations."""
        seat = position.setup.game.seat_to_move
        assert seat is not None
        point = BranchPoint(turn=len(position.turns), seat=seat)
        for sibling in range(1, self.branch.siblings):
            twin = position.fork("branch", point.turn, sibling)
            self.tasks.create_task(self._play_sibling(twin, point, sibling))
        await position.turn(self.generate)
        if position.ended is None:
            for number in range(1, self.branch.continuations):
                twin = position.fork("branch", point.turn, 0, number)
                self.tasks.create_task(self._play_on(twin, point, (0, number)))
        return point

    async def _play_sibling(self, twin: Position, point: BranchPoint, sibling: int) -> None:
        """Play a sibling turn from the same state, then its continuations."""
        await twin.turn(self.generate)
        if twin.ended is None:
            for number in range(1, self.branch.continuations):
                fork = twin.fork(number)
                self.tasks.create_task(self._play_on(fork, point, (sibling, number)))
            twin = twin.fork(0)
        await self._play_on(twin, point, (sibling, 0))

    async def _play_on(self, twin: Position, point: BranchPoint, key: tuple[int, int]) -> None:
        """Play a forked game to its end and keep it at `point.continuations[key]`."""
        episode = await play_turns(twin, self.generate)
        if episode.ended != VOID:  # an aborted game has no score to average
            point.continuations[key] = episode


def _is_branch_point(position: Position, branch: BranchConfig, num_points: int) -> bool:
    """Whether the next turn is a branch point. Only the policy's turns can be."""
    game = position.setup.game
    if game.seat_to_move is None or position.setup.players[game.seat_to_move].transcript is None:
        return False
    match branch.turns:
        case "all":
            return True
        case "first":
            return num_points < branch.per_game
        case _:  # decisions
            return num_points < branch.per_game and game.answer_due


def siblings_of(episode: Episode, point: BranchPoint) -> list[list[Episode]]:
    """The continuations of each sibling turn; the game's own turn is first."""
    siblings = {0: [episode]}
    for key in sorted(point.continuations):
        siblings.setdefault(key[0], []).append(point.continuations[key])
    return [*siblings.values()]
