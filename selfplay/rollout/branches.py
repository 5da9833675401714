"""Branches: at chosen turns a game is forked before its seat moves, other turns are tried from the
same state, and each is played on to its end.

The forked games are driven with all others, so one batch holds trunks and branches. Their draws are
named (…, episode, "branch", turn, sibling, future), which leaves every draw of the trunk as it is:
the trunk's episode is the one it would be without branches. Whether a turn is chosen never depends
on what follows it, else the turns compared would not be fair samples of the policy. Speaks of seats
and turns; knows no torch and no rewards.
"""

from __future__ import annotations

import random
from dataclasses import replace

from selfplay.config import Config
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


def branching_of(config: Config, names: tuple[object, ...]) -> Branching | None:
    """A game's branch plan from the settings; `names` are those of the game's draws."""
    branch = config.rollout.branch
    if branch.turns == "none":
        return None
    drawn: frozenset[int] = frozenset()
    if branch.turns == "random":
        generator = random.Random(named_seed(*names, "branch turns"))
        num = min(branch.per_game, config.rollout.max_turns)
        drawn = frozenset(generator.sample(range(config.rollout.max_turns), num))
    return Branching(
        rule=branch.turns,
        most=branch.per_game,
        drawn=drawn,
        siblings=branch.siblings,
        continuations=branch.continuations,
    )


def play_branching(position: Position, branching: Branching) -> Playing:
    """The trunk's game to its end, its branches started on the way.

    Sibling 0 of a branch point is the trunk's own turn, and its future 0 the trunk itself. A turn
    that ends the game has one future: there is nothing to draw.
    """
    points: list[BranchPoint] = []
    while position.ended is None:
        if not _chosen(position, branching, len(points)):
            yield from position.turn()
            continue
        point = _point(position)
        points.append(point)
        for sibling in range(1, branching.siblings):
            twin = position.fork("branch", point.turn, sibling)
            yield Spawn(named(twin.table, _sibling(twin, point, sibling, branching.continuations)))
        yield from position.turn()
        if position.ended is None:
            for continuation in range(1, branching.continuations):
                twin = position.fork("branch", point.turn, 0, continuation)
                yield Spawn(named(twin.table, _continuation(twin, point, (0, continuation))))
    # A seat out of tokens had no turn to compare.
    took = tuple(point for point in points if point.turn < len(position.turns))
    return replace(position.episode(), branches=took)


def siblings_of(episode: Episode, point: BranchPoint) -> list[list[Episode]]:
    """The futures of each sibling turn, the trunk's own first."""
    siblings: dict[int, list[Episode]] = {0: [episode]}
    for (sibling, _), continuation in sorted(point.continuations.items(), key=lambda item: item[0]):
        siblings.setdefault(sibling, []).append(continuation)
    return [siblings[sibling] for sibling in sorted(siblings)]


def _sibling(twin: Position, point: BranchPoint, sibling: int, num_continuations: int) -> Playing:
    """Another turn from the trunk's state, then its futures."""
    yield from twin.turn()
    if twin.ended is None:
        for continuation in range(1, num_continuations):
            fork = twin.fork(continuation)
            yield Spawn(named(fork.table, _continuation(fork, point, (sibling, continuation))))
        twin = twin.fork(0)
    return (yield from _continuation(twin, point, (sibling, 0)))


def _continuation(twin: Position, point: BranchPoint, place: tuple[int, int]) -> Playing:
    episode = yield from play(twin)
    if episode.ended != VOID:  # such a future says nothing of the turn it came from
        point.continuations[place] = episode
    return episode


def _point(position: Position) -> BranchPoint:
    seat = position.table.game.seat_to_move
    assert seat is not None
    return BranchPoint(turn=len(position.turns), seat=seat)


def _chosen(position: Position, branching: Branching, num_points: int) -> bool:
    """Whether the game is forked before the turn that is due; only a policy's turns are."""
    game = position.table.game
    if game.seat_to_move is None or position.table.players[game.seat_to_move].transcript is None:
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
