"""What a run's page shows of its league: scores of each period against each member, and ratings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfplay.config.player_spec import POOL
from selfplay.evaluation.tables import mean_interval
from selfplay.league.rating import Pair, bradley_terry


@dataclass(frozen=True, slots=True)
class Payoffs:
    """`rows` are the policy's periods, which end as the pool's members of these names, `columns`
    its partners; a cell is a mean score of the policy with its 95 % interval, None without games.
    `ratings` are Elo points with mean 0 over all players, by each side's share of both scores;
    empty where the seats always share their score, as then nobody wins."""

    rows: list[str]
    columns: list[str]
    cells: list[list[tuple[float, float, float] | None]]
    ratings: dict[str, float]


def payoffs(lines: Sequence[Mapping[str, Any]], *, every: int) -> Payoffs | None:
    """The table of the lines of `league.jsonl`; None without games. `every` is `policy_pool.every`:
    the policy of steps 21 to 40 becomes the member pool:40 of a pool of every 20 steps."""
    scores: dict[Pair, list[float]] = defaultdict(list)
    shares: dict[Pair, list[float]] = defaultdict(list)
    for line in lines:
        pair = f"{POOL}:{-(-line['step'] // every) * every}", line["partner"]
        for score, other, num in line["scores"]:
            scores[pair] += [score] * num
            shares[pair] += [0.5 if score == other else score / (score + other)] * num
    if not scores:
        return None
    rows = sorted({row for row, _ in scores}, key=_order)
    columns = sorted({column for _, column in scores}, key=_order)
    cells = [
        [
            mean_interval(scores[row, column]) if (row, column) in scores else None
            for column in columns
        ]
        for row in rows
    ]
    games = {pair: (float(len(of)), sum(of)) for pair, of in shares.items()}
    opposed = any(share != 0.5 for of in shares.values() for share in of)
    return Payoffs(rows, columns, cells, bradley_terry(games) if opposed else {})


def _order(name: str) -> tuple[bool, int, str]:
    """Members of the pool by their step, then others by name."""
    member = name.removeprefix(f"{POOL}:")
    return (False, int(member), "") if member.isdecimal() else (True, 0, name)
