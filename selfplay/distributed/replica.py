"""Replicas: neighbouring ranks that share one engine. The first of them leads: it owns the engine
and plays the replica's games.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Replica:
    """A rank's replica: number `index` of `num`, `size` ranks wide.

    `group` is the replica's gloo group in the engine's rank order, None when one rank wide.
    """

    index: int
    num: int
    size: int
    leads: bool
    group: dist.ProcessGroup | None

    def share(self, num_items: int) -> range:
        """Which of a step's items this rank plays: the leader its replica's, as even as can be."""
        return range(self.index, num_items, self.num) if self.leads else range(0)


def check_size(size: int, *, host_size: int) -> None:
    """Raises ValueError unless replicas of `size` ranks fit into hosts of `host_size` ranks each.

    An engine is started by one process, with GPUs that this process can see.
    """
    if size < 1 or host_size % size:
        fits = max(n for n in range(1, max(1, size) + 1) if host_size % n == 0)
        raise ValueError(
            f"engine.tp_size must divide the {host_size} processes of a host, since an engine "
            f"cannot cross hosts, got {size}; the nearest is {fits}"
        )


def make_replica(rank: int, world_size: int, size: int) -> Replica:
    """Cut the ranks into replicas of `size`, which `check_size` has let pass.

    Every rank calls it, since groups are made together.
    """
    index, place = divmod(rank, size)
    group = None
    if size > 1:
        for first in range(0, world_size, size):
            made = dist.new_group(list(range(first, first + size)), backend="gloo")
            if first == index * size:
                group = made
    return Replica(index, world_size // size, size, place == 0, group)
