"""What the best pair scores in `deal.py` if nothing is said, exactly.

    python -m examples.deal.silent

Without a message the first player enters a split at once. It knows only its own values and how
games are drawn, so it cannot beat the split with the highest expected share of the best joint value
given these; the other can only complete it. Every game is enumerated with its probability.
"""

from itertools import groupby, permutations
from operator import itemgetter
from statistics import fmean

from examples.deal.deal import COUNTS, able, minus, shares, worth


def silent_bound(counts_of_games=COUNTS):
    return fmean(map(bound_of, counts_of_games))


def bound_of(counts):
    """With these items; every ordered pair of different values is as likely."""
    pairs, total = list(permutations(able(counts), 2)), 0.0
    for own, group in groupby(pairs, key=itemgetter(0)):
        others = [other for _, other in group]

        def expected(share, own=own, others=others):
            left = minus(counts, share)
            joint = (worth(own, share) + worth(other, left) for other in others)
            best = (worth(map(max, own, other), counts) for other in others)
            return sum(map(lambda a, b: a / b, joint, best))

        total += max(map(expected, shares(counts)))
    return total / len(pairs)


if __name__ == "__main__":
    print(f"without a message at most {silent_bound():.4f} of the best joint value")
