"""Means of per-token metrics over micro-batches and ranks. M counts a micro-batch's tokens."""

from __future__ import annotations

from torch import Tensor

from selfplay.batch import MicroBatch
from selfplay.learner import is_filler
from selfplay.parallel import World, all_reduce_max, all_reduce_sum


class TokenMeans:
    """Sums of per-token metrics over micro-batches; their means over all ranks at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def add(self, values: dict[str, Tensor], batch: MicroBatch) -> None:
        real = 0.0 if is_filler(batch) else 1.0
        for name, values_M in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + real * float(values_M.detach().sum())
            self._counts[name] = self._counts.get(name, 0.0) + real * values_M.numel()

    def largest(self, name: str, values_M: Tensor, batch: MicroBatch) -> None:
        value = 0.0 if is_filler(batch) else float(values_M.max())
        self._largest[name] = max(self._largest.get(name, 0.0), value)

    def means(self) -> dict[str, float]:
        names = sorted(self._sums)  # every rank made the same micro-batch kinds, so the names agree
        sums = all_reduce_sum([self._sums[n] for n in names], self._world)
        counts = all_reduce_sum([self._counts[n] for n in names], self._world)
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        return means | {
            n: all_reduce_max(self._largest[n], self._world) for n in sorted(self._largest)
        }
