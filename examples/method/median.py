"""A custom advantage: the return minus the median of the group, so one lucky game of eight does not
make the other seven look bad.

    python -m selfplay.check examples/method/median.py:advantage
    python train.py --config configs/tiny.yaml out=runs/median \
        algorithm.advantage=examples/method/median.py:advantage
"""

from collections import defaultdict
from statistics import median


def advantage(samples, state, algorithm):
    """Each sample's (baseline, divisor): its group's median, and 1; None leaves a sample out, in a
    group of equal returns."""
    returns = defaultdict(list)
    for sample in samples:
        returns[sample.group].append(sample.mean)
    return [
        (median(group), 1.0) if max(group) > min(group) else None
        for group in (returns[sample.group] for sample in samples)
    ]
