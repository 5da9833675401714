"""Branch points: the game is forked before chosen turns, sibling turns are sampled from the same
state, and each sibling is played on to the end.

The forked games run in the same batches as all others. Their draws are named (..., episode,
"branch", turn, sibling, continuation), so the game itself is exactly what it would be without
branches. Whether a turn becomes a branch point never depends on what follows it; otherwise the
siblings would not be fair samples of the policy.
"""

from __future__ import annotations

import random
from dataclasses import replace

from selfplay.config import RolloutConfig
from selfplay.data.seeds import named_seed
from selfplay.rollout.episode import (
    VOID,
    Branching,
    BranchPoint,
    Episode,
    Playing,
    Position,
    Spawn,
    named,
    play,
)


def branching_of(rollout: RolloutConfig, names: tuple[object, ...]) -> Branching | None:
    """A game's branch plan; None without branching. `names` seed its random choice of turns."""
    branch = rollout.branch
    if branch.turns == "none":
        return None
    drawn: frozenset[int] = frozenset()
    if branch.turns == "random":
        generator = random.Random(named_seed(*names, "branch turns"))
        num = min(branch.per_game, rollout.max_turns)
        drawn = frozenset(generator.sample(range(rollout.max_turns), num))
    return Branching(
        rule=branch.turns,
        most=branch.per_game,
        drawn=drawn,
        siblings=branch.siblings,
        continuations=branch.continuations,
    )


def play_branching(position: Position, branching: Branching) -> Playing:
    """Play the game to its end and start its branches as their turns are reached.

    Sibling 0 of a branch point is the turn that the game itself took, and its continuation 0 is the
    game itself. A turn that ends the game has no other continuation.
    """
    points: list[BranchPoint] = []
    while position.ended is None:
        if not _is_branch_point(position, branching, len(points)):
            yield from position.turn()
            continue
        point = _branch_point(position)
        points.append(point)
        for sibling in range(1, branching.siblings):
            twin = position.fork("branch", point.turn, sibling)
            yield Spawn(
                named(twin.setup, _play_sibling(twin, point, sibling, branching.continuations))
            )
        yield from position.turn()
        if position.ended is None:
            for continuation in range(1, branching.continuations):
                twin = position.fork("branch", point.turn, 0, continuation)
                yield Spawn(named(twin.setup, _play_continuation(twin, point, (0, continuation))))
    # Drop branch points whose seat had no tokens left for a turn.
    taken = tuple(point for point in points if point.turn < len(position.turns))
    return replace(position.episode(), branches=taken)


def siblings_of(episode: Episode, point: BranchPoint) -> list[list[Episode]]:
    """The continuations of each sibling turn, those of the game's own turn first."""
    siblings: dict[int, list[Episode]] = {0: [episode]}
    for (sibling, _), continuation in sorted(point.continuations.items(), key=lambda item: item[0]):
        siblings.setdefault(sibling, []).append(continuation)
    return [siblings[sibling] for sibling in sorted(siblings)]


def _play_sibling(
    twin: Position, point: BranchPoint, sibling: int, num_continuations: int
) -> Playing:
    """A sibling turn from the same state, then its continuations."""
    yield from twin.turn()
    if twin.ended is None:
        for continuation in range(1, num_continuations):
            fork = twin.fork(continuation)
            yield Spawn(named(fork.setup, _play_continuation(fork, point, (sibling, continuation))))
        twin = twin.fork(0)
    return (yield from _play_continuation(twin, point, (sibling, 0)))


def _play_continuation(twin: Position, point: BranchPoint, place: tuple[int, int]) -> Playing:
    """Play a forked game to its end and keep it at `point.continuations[place]`."""
    episode = yield from play(twin)
    if episode.ended != VOID:  # a void game has no score to average
        point.continuations[place] = episode
    return episode


def _branch_point(position: Position) -> BranchPoint:
    seat = position.setup.game.seat_to_move
    assert seat is not None
    return BranchPoint(turn=len(position.turns), seat=seat)


def _is_branch_point(position: Position, branching: Branching, num_points: int) -> bool:
    """Whether the next turn is a branch point. Only the policy's turns can be."""
    game = position.setup.game
    if game.seat_to_move is None or position.setup.players[game.seat_to_move].transcript is None:
        return False
    match branching.rule:
        case "all":
            return True
        case "random":
            return len(position.turns) in branching.drawn
        case "first":
            return num_points < branching.most
        case "decisions":
            return num_points < branching.most and game.answer_due
    raise ValueError(f"a branch plan must be all, random, first or decisions, got {branching.rule}")
