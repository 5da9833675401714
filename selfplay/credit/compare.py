"""Advantages over all ranks: what every rank's samples earned, compared where they were dealt to.

Knows no games, no text and no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.config import Config
from selfplay.credit.advantages import assign_advantages, sample_statistics, updated_baselines
from selfplay.credit.sample import Sample
from selfplay.distributed import World, gather_objects


def compute_advantages(
    samples: Sequence[Sample], baselines: dict[str, float], *, config: Config, world: World
) -> tuple[list[Sample], dict[str, float]]:
    """This rank's samples with their advantages, and ema's baselines for the next step, the same on
    every rank."""
    algorithm = config.algorithm
    among = gather_objects(sample_statistics(samples, algorithm=algorithm), world)
    compared = assign_advantages(samples, algorithm=algorithm, among=among, baselines=baselines)
    return compared, updated_baselines(baselines, among, algorithm=algorithm)
