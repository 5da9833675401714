"""Metrics and records of branch points: their cost, the spread of their sibling turns' values.

A turn's value is the mean normalized score (0 to 1) of its continuations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.advantages.advantages import CreditStats
from selfplay.rollout.episode import BranchPoint, Episode, siblings_of


def branch_tally(episodes: Sequence[Episode], credited: CreditStats) -> dict[str, float]:
    """Sums over branch points, which can be added over ranks; empty if no game was forked.

    `branch_tokens` counts the tokens sampled in sibling turns and in continuations,
    `branch_continuation_tokens` only those in continuations. Neither counts the played games' own
    tokens.
    """
    points = [(episode, point) for episode in episodes for point in episode.branches]
    if not points:
        return {}
    values_K = [turn_values(episode, point) for episode, point in points]
    num_turn_tokens, num_continuation_tokens = 0, 0
    for episode, point in points:
        # Sibling 0 is the played game's own turn. Each other sibling was sampled once, whatever its
        # number of continuations.
        for continuations in siblings_of(episode, point)[1:]:
            num_turn_tokens += continuations[0].turns[point.turn].num_tokens
        for continuation in point.continuations.values():
            later = continuation.turns[point.turn + 1 :]
            num_continuation_tokens += sum(turn.num_tokens for turn in later)
    return {
        "branch_points": float(len(points)),
        "branch_games": float(sum(len(point.continuations) for _, point in points)),
        "branch_tokens": float(num_turn_tokens + num_continuation_tokens),
        "branch_continuation_tokens": float(num_continuation_tokens),
        "branch_turns": float(sum(len(values) for values in values_K)),
        "branch_groups": float(credited.num_branch_groups),
        "branch_zero_variance_groups": float(credited.num_zero_variance_branch_groups),
        "branch_squares": sum(
            sum((value - _mean(values)) ** 2 for value in values) for values in values_K
        ),
    }


def branch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step from the sums of all ranks; empty if no game was forked."""
    if "branch_points" not in sums:
        return {}
    return {
        "num_branch_points": sums["branch_points"],
        "num_branch_games": sums["branch_games"],
        "num_branch_tokens": sums["branch_tokens"],
        "num_continuation_tokens": sums["branch_continuation_tokens"],
        "zero_variance_branches": sums["branch_zero_variance_groups"] / sums["branch_groups"],
        "branch_variance": sums["branch_squares"] / sums["branch_turns"],
    }


def turn_values(episode: Episode, point: BranchPoint) -> list[float]:
    """The mean score of each sibling turn's continuations, the played game's own turn first."""
    return [
        _mean([continuation.score for continuation in continuations])
        for continuations in siblings_of(episode, point)
    ]


def branch_records(episode: Episode) -> list[dict[str, Any]]:
    """The branch points of one game as they are written to games.jsonl.

    Sibling 0 is the turn that the played game took, and its first score is that game's.
    """
    records = []
    for point in episode.branches:
        siblings = []
        for continuations in siblings_of(episode, point):
            turn = continuations[0].turns[point.turn]
            scores = [continuation.score for continuation in continuations]
            siblings.append(
                {"text": turn.text, "error": turn.error, "value": _mean(scores), "scores": scores}
            )
        records.append({"turn": point.turn, "seat": point.seat, "siblings": siblings})
    return records


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
