"""Measures how often intervals of paired differences cover the true mean, and their widths.

    python -m bench.paired_intervals [--num 4000] [--games 57 64 128 256 1024]

`--num` samples of each number of games are drawn from distributions of differences. The intervals
are a percentile bootstrap, `mean_interval` from -1 to 1, and `paired_interval`. Printed are the
share of samples whose interval covers the true mean, and the mean width relative to the bootstrap.

The first five distributions served to choose `paired_interval`, the next four did not. The ones of
matching, planning and mediation are differences of scripted players on held-out games of the full
sizes, rounded. The last distribution has losses that a sample may not have: no narrow interval
covers its mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.rows import count
from selfplay.evaluation.tables import further_points

Floats = NDArray[np.float64]

# Differences with their numbers of games.
CHOSEN: dict[str, dict[float, int]] = {
    "self-play's rise on small boards": {
        -1.0: 1, -0.8: 1, -0.7: 2, -0.6: 1, -0.5: 4, -0.4: 3, 0.0: 416, 0.4: 5, 0.5: 14, 0.6: 9,
        0.7: 7, 0.8: 13, 0.9: 5, 1.0: 31,
    },
    "a cross-play loss, sd 0.08": {
        -0.2: 4, -0.15: 10, -0.1: 25, -0.05: 55, 0.0: 90, 0.05: 90, 0.1: 55, 0.15: 25, 0.2: 10,
        0.25: 4,
    },
    "a rise of 0.05 in cities": {
        -0.5: 1, -0.3: 2, -0.2: 6, -0.1: 17, 0.0: 25, 0.1: 25, 0.2: 16, 0.3: 5, 0.4: 2, 0.6: 1,
    },
    "a talk effect": {
        -1.0: 6, -0.5: 10, -0.25: 10, 0.0: 330, 0.25: 30, 0.5: 50, 0.75: 36, 1.0: 40,
    },
    "mediation, honest and solo": {
        -0.02: 1, 0.0: 56, 0.02: 16, 0.04: 8, 0.06: 5, 0.08: 5, 0.1: 5, 0.12: 1, 0.14: 2, 0.16: 1,
    },
}  # fmt: skip
UNSEEN: dict[str, dict[float, int]] = {
    "matching, honest and solo": {
        0.0: 2, 0.05: 3, 0.1: 14, 0.15: 12, 0.2: 97, 0.25: 60, 0.3: 10, 0.35: 2,
    },
    "matching, solo and random": {
        -0.1: 1, -0.05: 4, 0.0: 7, 0.05: 28, 0.1: 24, 0.15: 31, 0.2: 37, 0.25: 27, 0.3: 16,
        0.35: 20, 0.4: 3, 0.45: 1, 0.5: 1,
    },
    "planning, searcher and guesser": {
        0.0: 2, 0.1: 3, 0.2: 13, 0.3: 13, 0.4: 28, 0.5: 20, 0.6: 12, 0.7: 7, 0.8: 2,
    },
    "mediation, honest and random": {
        0.0: 3, 0.05: 2, 0.1: 7, 0.15: 10, 0.2: 8, 0.25: 5, 0.3: 9, 0.35: 8, 0.4: 9, 0.45: 8,
        0.5: 5, 0.55: 9, 0.6: 3, 0.65: 2, 0.7: 5, 0.75: 4, 0.8: 2, 0.85: 1,
    },
}  # fmt: skip
NOT_COVERED = {"0.01 or 0.02, but -1 once in 100": {0.01: 60, 0.02: 39, -1.0: 1}}
_DRAWS = 2_000  # of weights, the same for all samples
_AT_A_TIME = 250  # samples


@lru_cache
def _weights(num_games: int) -> tuple[Floats, Floats]:
    """Weights [game, draw] of a bootstrap and of Gaffke's bounds."""
    rng = np.random.default_rng(0)
    resampled = rng.multinomial(num_games, [1 / num_games] * num_games, size=_DRAWS).T / num_games
    return resampled, rng.dirichlet([1.0] * num_games, size=_DRAWS).T


def intervals(samples: Floats) -> dict[str, Floats]:
    """The ends [2, sample] of three intervals of each sample [sample, game] of differences."""
    resampled, weights = _weights(samples.shape[1])
    found: dict[str, list[Floats]] = {}
    for start in range(0, len(samples), _AT_A_TIME):
        some = samples[start : start + _AT_A_TIME]
        means, ends = some @ weights, np.array([further_points(one) for one in some]).T
        limits = np.array([[-1.0], [1.0]]).repeat(len(some), axis=1)
        of_three = {
            "bootstrap": np.quantile(some @ resampled, (0.025, 0.975), axis=1),
            "mean_interval": _gaffke(means, limits, samples.shape[1]),
            "paired_interval": _gaffke(means, ends, samples.shape[1]),
        }
        for name, of_some in of_three.items():
            found.setdefault(name, []).append(of_some)
    return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}


def _gaffke(means: Floats, points: Floats, num_games: int) -> Floats:
    """Gaffke's bounds [2, sample] by means [sample, draw] and the further points [2, sample]."""
    others = ((np.arange(_DRAWS) + 0.5) / _DRAWS) ** (1 / num_games)
    ends = [point[:, None] + others * (means - point[:, None]) for point in points]
    return np.array([np.quantile(e, q, axis=1) for e, q in zip(ends, (0.025, 0.975), strict=True)])


def study(
    differences: Mapping[float, int], num_games: int, *, num: int
) -> dict[str, tuple[float, float]]:
    """Of each interval the share of `num` samples in which it covers the mean, and its mean
    width."""
    every = np.repeat(list(differences), list(differences.values()))
    samples = np.random.default_rng(num_games).choice(every, (num, num_games))
    return {
        name: (float(((low <= every.mean()) & (every.mean() <= high)).mean()), (high - low).mean())
        for name, (low, high) in intervals(samples).items()
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=count, default=4_000, help="samples of each kind")
    parser.add_argument("--games", type=count, nargs="+", default=[57, 64, 128, 256, 1024])
    args = parser.parse_args(words)
    head = ["differences", "games", "bootstrap", "limits", "width", "3 sd", "width"]
    print(f"| {' | '.join(head)} |\n|---|{'--:|' * (len(head) - 1)}")
    for name, differences in (CHOSEN | UNSEEN | NOT_COVERED).items():
        for games in args.games:
            (covered, narrow), *others = study(differences, games, num=args.num).values()
            shown = [f"{share:.3f} | {width / narrow:.2f}" for share, width in others]
            print(f"| {name} | {games:,} | {covered:.3f} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
