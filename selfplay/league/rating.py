"""Ratings of players by the scores of their games: Bradley and Terry's model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

PRIOR = 1.0  # games of each player that end in a draw with an average one
ELO = 400.0 / math.log(10.0)
_ROUNDS, _CLOSE = 10_000, 1e-9

Pair = tuple[str, str]


def bradley_terry(games: Mapping[Pair, tuple[float, float]]) -> dict[str, float]:
    """Each player's rating on Elo's scale, with mean 0: 400 points are odds of 10 to 1.

    `games[one, other]` are the number of their games and the sum of the scores of `one`, from 0 to
    1; the other's scores are 1 minus these, so a draw counts half a win. A player of strength s
    wins against t with probability s / (s + t) (Bradley and Terry 1952); Hunter's minorization
    finds the likeliest strengths (2004, doi.org/10.1214/aos/1079120141, eq. 3). Each player also
    draws `PRIOR` games with one of strength 1, so that who never lost has a rating.
    """
    wins: dict[str, float] = defaultdict(float)
    met: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (one, other), (num, score) in games.items():
        if one == other:
            continue
        wins[one] += score
        wins[other] += num - score
        met[one][other] += num
        met[other][one] += num
    strengths = dict.fromkeys(met, 1.0)
    for _ in range(_ROUNDS):
        new = {
            name: (wins[name] + PRIOR / 2)
            / math.fsum(
                (
                    PRIOR / (s + 1.0),
                    *(num / (s + strengths[other]) for other, num in met[name].items()),
                )
            )
            for name, s in strengths.items()
        }
        gap = max((abs(math.log(new[name] / s)) for name, s in strengths.items()), default=0.0)
        strengths = new
        if gap < _CLOSE:
            break
    ratings = {name: ELO * math.log(s) for name, s in strengths.items()}
    mean = math.fsum(ratings.values()) / max(1, len(ratings))
    return {name: rating - mean for name, rating in ratings.items()}
