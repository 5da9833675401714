"""Replicas: neighbouring ranks that share one engine.

The first rank of a replica is its leader: it owns the engine and plays the replica's games.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Replica:
    """This rank's replica: number `index` of `num`, of `size` ranks; `leads` marks its leader.

    `group` is the replica's gloo group in the engine's rank order, None for a single rank.
    """

    index: int
    num: int
    size: int
    leads: bool
    group: dist.ProcessGroup | None

    def share(self, num_items: int) -> range:
        """This rank's items of a step: leaders share them evenly, other ranks have none."""
        return range(self.index, num_items, self.num) if self.leads else range(0)


def check_size(size: int, *, host_size: int) -> None:
    """Raise ValueError unless `size` divides the `host_size` ranks of each host.

    One process starts an engine, on GPUs that this process can see.
    """
    if size < 1 or host_size % size:
        nearest = max(n for n in range(1, max(1, size) + 1) if host_size % n == 0)
        raise ValueError(
            f"engine.tp_size must divide the {host_size} processes of a host, since an engine "
            f"cannot cross hosts, got {size}; the nearest is {nearest}"
        )


def make_replica(rank: int, world_size: int, size: int) -> Replica:
    """Split the ranks into replicas of `size` ranks, a size that passes `check_size`.

    Every rank must call this, because creating process groups is collective.
    """
    index, place = divmod(rank, size)
    group = None
    if size > 1:
        for first in range(0, world_size, size):
            new_group = dist.new_group(list(range(first, first + size)), backend="gloo")
            if first == index * size:
                group = new_group
    return Replica(index, world_size // size, size, place == 0, group)
