"""Run under torchrun by test_resample.py: two ranks fill a batch together and compare its samples.

Usage: torchrun --nproc-per-node 2 tests/resample_worker.py. Rank 0 says which places each rank
played and, for each method, which advantages its samples got.
"""

from __future__ import annotations

from functools import partial

from processes import say
from test_resample import config_of, place_games

from selfplay.batch import share_by_tokens
from selfplay.compare import compare
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.credit import reward_samples
from selfplay.parallel import close_world, gather_objects, init_world
from selfplay.resample import play_full

METHODS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ema")


def telling(place: int) -> bool:
    """Rank 0, which plays the even ones of the first four, has none and rank 1 has both."""
    return place in (1, 3) or place >= 5


def main() -> None:
    world = init_world(device="cpu")
    asked: list[list[int]] = []
    config = config_of(20)
    episodes, _ = play_full(partial(place_games, telling, asked), config=config, world=world)
    told: dict[str, object] = {"asked": asked}
    for method in METHODS:
        algorithm = AlgorithmConfig(method=method)
        samples, _ = reward_samples(episodes, algorithm=algorithm, reward=RewardConfig())
        mine = share_by_tokens(samples, world)
        found, baselines = compare(
            mine, {"seat 0": 0.25}, config=config_of(0, f"algorithm={method}"), world=world
        )
        told[method] = {
            "advantages": {sample.name: sample.advantages[-1] for sample in found},
            "baselines": baselines,
        }
    # One rank speaks for both, for the lines of two would run into each other.
    everyone = gather_objects(told, world)
    if world.rank == 0:
        say("ranks", told=everyone)
    close_world(world)


if __name__ == "__main__":
    main()
