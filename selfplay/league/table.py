"""What a run's page shows of its league: scores of each period against each member, and ratings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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


def payoffs(
    lines: Sequence[Mapping[str, Any]], *, every: int, policies: Collection[str] = ()
) -> Payoffs | None:
    """The table of the lines of `league.jsonl`; None without games. `every` is `policy_pool.every`:
    the policy of steps 21 to 40 becomes the member pool:40 of a pool of every 20 steps.

    Of several `policies` those play whose seats the partner has not: against left=pool:20 the
    policy right becomes right=pool:40."""
    scores: dict[Pair, list[float]] = defaultdict(list)
    shares: dict[Pair, list[float]] = defaultdict(list)
    for line in lines:
        policy, _ = _apart(line["partner"])
        whose = "+".join(name for name in policies if name != policy) + "=" if policy else ""
        pair = f"{whose}{POOL}:{-(-line['step'] // every) * every}", line["partner"]
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


def _order(name: str) -> tuple[str, bool, int, str]:
    """By policy, if there are several: members of the pool by their step, then others by name."""
    policy, partner = _apart(name)
    member = partner.removeprefix(f"{POOL}:")
    return (policy, False, int(member), "") if member.isdecimal() else (policy, True, 0, partner)


def _apart(name: str) -> tuple[str, str]:
    """The policy of one of several whose seats a player has, else "", and the player. A player's
    own name may have an = too, but only behind a colon."""
    found = re.match(r"([\w+]+)=", name)
    return (found[1], name[found.end() :]) if found else ("", name)
