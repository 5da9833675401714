"""Elo ratings for a cooperative game: the players of a game on one side, the instance on the other.

There is no opponent to beat, so a pair plays against the instance. The pair's rating is the mean of
its two players' ratings (with more seats, of all players'); the instance's rating is 0 by
definition. The pair's expected share of the best score is Elo's (A. Elo, "The Rating of
Chessplayers", 1978)

    E = 1 / (1 + 10^(-(r_a + r_b) / 2 / 400))

and a game with score s moves both players by K (s - E). A rating of 400 means 0.91 of the best
score, 0 means half of it. Games show only the sum of two ratings, so the two are separable only if
the policy also plays with itself. Works on plain floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

INITIAL_RATING = 0.0  # the rating of a player without games


def expected_score(*ratings: float) -> float:
    """The expected share of the best score of players with these ratings, in (0, 1)."""
    return float(1 / (1 + 10 ** (-sum(ratings) / (400 * len(ratings)))))


def update_ratings(
    ratings: Mapping[str, float], games: Iterable[tuple[Any, ...]], *, step: float
) -> dict[str, float]:
    """New ratings after games of (player, player, ..., score in [0, 1]), applied in order.

    `step` is Elo's K, the largest change of a rating by one game. A player paired with itself moves
    once per game.
    """
    new = dict(ratings)
    for *players, score in games:
        before = {player: new.get(player, INITIAL_RATING) for player in players}
        change = step * (score - expected_score(*(before[player] for player in players)))
        new |= {player: rating + change for player, rating in before.items()}
    return new


def draw_weights(ratings: Iterable[float], *, prefer_weak: float) -> list[float]:
    """Sampling probabilities, proportional to 10^(-prefer_weak r / 400)."""
    exponents = [-prefer_weak * rating / 400 for rating in ratings]
    largest = max(exponents)
    weights = [10 ** (exponent - largest) for exponent in exponents]
    return [weight / sum(weights) for weight in weights]
