"""Ratings of players who win together: Elo's formula with the pair on one side, the task on the
other.

In a cooperative game there is no opponent to beat, so a pair plays against the instance, whose
rating is 0 by definition, with the mean of its two ratings. Its expected share of the best score is
Elo's (A. Elo, "The Rating of Chessplayers", 1978) E = 1 / (1 + 10^(-(r_a + r_b) / 2 / 400)), and
after a game with score s both move by K (s - E). A rating of 400 stands for 0.91 of the best, 0 for
a half. What is observed is the sum of two ratings: only with games of the policy by itself are they
told apart. Floats only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FIRST = 0.0  # the rating of somebody nobody has played with yet


def expected_score(rating_a: float, rating_b: float) -> float:
    """The pair's expected share of the best score, in (0, 1)."""
    return float(1 / (1 + 10 ** (-(rating_a + rating_b) / 800)))


def rated(
    ratings: Mapping[str, float], games: Iterable[tuple[str, str, float]], *, step: float
) -> dict[str, float]:
    """New ratings after games of (player, player, score in [0, 1]), one after the other.

    `step` is Elo's K, the most a rating moves by one game. Whoever plays with itself moves once.
    """
    new = dict(ratings)
    for one, other, score in games:
        pair = new.get(one, FIRST), new.get(other, FIRST)
        change = step * (score - expected_score(*pair))
        new |= {one: pair[0] + change, other: pair[1] + change}
    return new


def draw_weights(ratings: Iterable[float], *, prefer_weak: float) -> list[float]:
    """How often each is to be met, adding up to 1: in proportion to 10^(-prefer_weak r / 400)."""
    exponents = [-prefer_weak * rating / 400 for rating in ratings]
    largest = max(exponents)
    weights = [10 ** (exponent - largest) for exponent in exponents]
    return [weight / sum(weights) for weight in weights]
