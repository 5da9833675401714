"""Run under torchrun by test_batch.py: four ranks, two to a row, share their samples by tokens.

Usage: torchrun --nproc-per-node 4 tests/share_worker.py. Rank 0 says whose samples each rank got.
"""

from __future__ import annotations

from dataclasses import asdict

from processes import say
from test_batch import SHARED, sample_of

from selfplay.batch import share_by_tokens
from selfplay.parallel import close_world, gather_objects, init_world


def main() -> None:
    world = init_world(tp=2, device="cpu")
    samples = [sample_of(name, length) for name, length in SHARED[world.rank].items()]
    mine = share_by_tokens(samples, world)
    everyone = gather_objects([asdict(sample) for sample in mine], world)
    if world.rank == 0:
        say("ranks", got=everyone)
    close_world(world)


if __name__ == "__main__":
    main()
