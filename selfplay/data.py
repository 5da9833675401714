"""Instance streams and named seeds. Instance i of a stream is the same whatever was drawn before.

An instance is of its game's own type. Knows no rules, no torch, no tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from selfplay.config import Config, GameConfig
from selfplay.games import kit_of
from selfplay.settings import SettingsError

# Streams of generated instances never meet: each purpose has its own name in the seed.
TRAIN, VALIDATION, HELD_OUT = "train", "validation", "held-out"
TEACHERS, TOKENIZER = "teachers", "tokenizer"


def named_seed(*names: object) -> int:
    """A 63-bit seed from the names of a draw, such as (run seed, step, instance, seat, turn)."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generated(config: Config, purpose: str, *, start: int, num: int) -> list[Any]:
    """Instances start..start+num-1 of the run's stream for `purpose`.

    Validation and held-out instances are the same for every run seed, and share none with any
    training stream.
    """
    fixed = purpose in (VALIDATION, HELD_OUT)
    seed = named_seed("instances", None if fixed else config.seed, purpose)
    easy = purpose in (TEACHERS, TOKENIZER) and config.warm_start.keep == "all"
    processes = 1 if num < 64 else config.data.processes
    if purpose == VALIDATION:  # asked for again and again
        return list(_kept(config.game, seed, start, num, processes))
    return kit_of(config.game).generate(
        config.game, seed=seed, start=start, num=num, processes=processes, easy=easy
    )


@lru_cache(maxsize=1)
def _kept(game: GameConfig, seed: int, start: int, num: int, processes: int) -> tuple[Any, ...]:
    drawn = kit_of(game).generate(
        game, seed=seed, start=start, num=num, processes=processes, easy=False
    )
    return tuple(drawn)


class TrainStream:
    """The training instances of each step: generated online, or a file read in seeded epochs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._file: Sequence[Any] | None = None
        if config.data.train != "generated":
            path = Path(config.data.train)
            if not path.exists():
                raise SettingsError(
                    f"data.train must be 'generated' or an existing file, got {path}"
                )
            self._file = kit_of(config.game).read(path)
            if len(self._file) < config.rollout.instances:
                raise SettingsError(
                    f"rollout.instances must be at most the {len(self._file)} instances of {path}, "
                    f"got {config.rollout.instances}"
                )

    def step(self, step: int, indices: Sequence[int]) -> list[Any]:
        """The instances of a step at these places of its batch (each rank asks for its own).

        An epoch of a file is whole steps, so that no step holds an instance twice; each epoch's
        shuffle leaves out another rest.
        """
        batch = self._config.rollout.instances
        if self._file is None:
            return [
                generated(self._config, TRAIN, start=step * batch + i, num=1)[0] for i in indices
            ]
        epoch, step_of_epoch = divmod(step, len(self._file) // batch)
        order = self._order(epoch)
        return [self._file[order[step_of_epoch * batch + i]] for i in indices]

    def _order(self, epoch: int) -> list[int]:
        """A seeded shuffle of the file for one epoch."""
        assert self._file is not None
        names = range(len(self._file))
        return sorted(names, key=lambda i: named_seed("order", self._config.seed, epoch, i))
