"""Engine faults over ranks: when an engine fails, every rank learns of it at the same place.

The ranks meet again and again in collectives (gathers, pushes, updates). A rank that left one of
them with an error of its own engine would leave the others waiting. So a rank keeps its EngineFault
until the end of a block in which all ranks take part, and there all of them raise EnginesFailed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from selfplay.distributed import World, gather_objects
from selfplay.errors import EngineFault, RunEnds


class EnginesFailed(RuntimeError):
    """Engines of these ranks failed, for these causes; every rank raises it at the same point."""

    def __init__(self, causes: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items()))
        self.causes = dict(causes)


class EngineLost(RunEnds):
    """An engine failed too often in a row; every rank raises it at the same point."""


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Raise EnginesFailed on every rank if this block raises an EngineFault on any rank. Every rank
    must enter it."""
    fault: EngineFault | None = None
    try:
        yield
    except EngineFault as error:
        fault = error
    leads = world.replica.leads  # the other ranks of a replica only repeat their leader's fault
    told = gather_objects(str(fault) if fault is not None and leads else None, world)
    causes = {rank: cause for rank, cause in enumerate(told) if cause is not None}
    if causes:
        raise EnginesFailed(causes) from fault
