"""Means of per-token metrics over micro-batches and ranks. M counts a micro-batch's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from selfplay.distributed import World, all_reduce_max, all_reduce_sum
from selfplay.learner.batch import MicroBatch
from selfplay.learner.learner import is_filler


class TokenMeans:
    """Sums per-token metrics over micro-batches and averages them over all ranks at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Sums stay on the device: reading one would make the host wait for it.
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self._largest: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor], batch: MicroBatch) -> None:
        """Add values [M] under their names; those of a filler count as none."""
        real = 0.0 if is_filler(batch) else 1.0
        for name, values_M in values.items():
            total = real * values_M.detach().sum().double()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._counts[name] = self._counts.get(name, 0.0) + real * values_M.numel()

    def largest(self, name: str, values_M: Tensor, batch: MicroBatch) -> None:
        """Keep the largest of all values under this name, at least 0."""
        value = (0.0 if is_filler(batch) else 1.0) * values_M.detach().max()
        before = self._largest.get(name)
        self._largest[name] = value if before is None else torch.maximum(before, value)

    def means(self) -> dict[str, float]:
        """Means and largest values by name. Every rank must call, with the same names."""
        names = sorted(self._sums)
        sums = all_reduce_sum([float(self._sums[n]) for n in names], self._world)
        counts = all_reduce_sum([self._counts[n] for n in names], self._world)
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        largest = {name: max(0.0, float(value)) for name, value in sorted(self._largest.items())}
        return means | {n: all_reduce_max(value, self._world) for n, value in largest.items()}
