"""Which instances a training step plays.

The instances of a step are numbered 0..rollout.instances-1, then come those that methods play, such
as the replacements of zero-variance groups. An instance depends on the settings, the step and its
number, never on the number of ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from threading import Thread
from typing import Any

from dialop.game import Instance
from dialop.starts import RecordedGame, checked_entries
from dialop.workers import Spawn
from selfplay.config import Config, GameConfig
from selfplay.data.instances import (
    GENERATED,
    TRAIN,
    begun,
    generated,
    read_file,
    read_recorded,
)
from selfplay.data.seeds import named_seed
from selfplay.errors import SettingsError

Origin = tuple[str, int]  # a stream's name and the instance's number in it
RESAMPLED, FILE = "resampled", "file"


class TrainStream:
    """The training instances of each step: generated online, or a file read in shuffled epochs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._file: Sequence[Instance] | None = None
        self._prefetcher: Prefetcher | None = None
        if config.data.train != GENERATED:
            self._file = read_train_file(config)
        elif config.data.processes > 1:
            self._prefetcher = Prefetcher(
                config.game, seed=config.seed, processes=config.data.processes
            )
        self._recorded: Sequence[RecordedGame] = ()
        if config.data.start != 0:
            self._recorded = read_recorded(config.game, "data.start", config.data.train)

    def step(self, step: int, numbers: Iterable[int]) -> list[Instance]:
        """The instances of a step with these numbers; each rank passes its own.

        All instances of a step are different. An epoch of a file has as many full steps as fit; the
        instances left over differ from epoch to epoch.
        """
        batch, numbers = self._config.rollout.instances, list(numbers)
        origins = [self._origin(step, number) for number in numbers]
        if self._prefetcher is None:
            return [self._instance(origin, step) for origin in origins]
        later = [self._origin(step + 1, number) for number in numbers if number < batch]
        return self._prefetcher.draw(origins, later)

    def close(self) -> None:
        """End the prefetch workers."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _origin(self, step: int, number: int) -> Origin:
        batch, num_more = self._config.rollout.instances, self._config.more_instances
        if self._file is not None:
            epoch, step_of_epoch = divmod(step, len(self._file) // batch)
            index = (step_of_epoch * batch + number) % len(self._file)
            return FILE, self._order(epoch)[index]
        if number < batch:
            return TRAIN, step * batch + number
        return RESAMPLED, step * num_more + number - batch

    def _instance(self, origin: Origin, step: int) -> Instance:
        source, number = origin
        if source == FILE and self._recorded:
            entries = checked_entries(self._config.data.start)
            names = (self._config.seed, step, number)
            continued: Instance = begun(self._recorded[number], entries, *names)
            return continued
        if source == FILE:
            assert self._file is not None
            return self._file[number]
        return _one(self._config.game, self._config.seed, source, number)

    def _order(self, epoch: int) -> list[int]:
        """The indices of the file in the shuffled order of an epoch; caches the last epoch."""
        assert self._file is not None
        if self._shuffled[0] != epoch:
            indices, seed = range(len(self._file)), self._config.seed
            order = sorted(indices, key=lambda i: named_seed("order", seed, epoch, i))
            self._shuffled = epoch, order
        return self._shuffled[1]


def read_train_file(config: Config) -> Sequence[Instance]:
    """The instances of data.train. Raises SettingsError if they are too few for one step."""
    path, batch, num_more = config.data.train, config.rollout.instances, config.more_instances
    instances: Sequence[Instance] = read_file(config.game, "data.train", path)
    if len(instances) < batch:
        raise SettingsError(
            f"rollout.instances must be at most the {len(instances)} instances of {path}, "
            f"got {batch}"
        )
    if len(instances) < batch + num_more:
        raise SettingsError(
            f"the instances that methods add, such as methods.resample.instances, must be at most "
            f"{len(instances) - batch} (the {len(instances)} instances of {path} minus "
            f"rollout.instances), got {num_more}"
        )
    return instances


class Prefetcher:
    """Worker processes that generate the next step's instances during the current step.

    They start at the first `draw`. A hard 8x8 board takes 20 ms to generate, a batch of 64 more
    than a second. The instances do not depend on the process that generates them.
    """

    def __init__(self, game: GameConfig, *, seed: int, processes: int) -> None:
        self._game, self._seed = game, seed
        self._pool = ProcessPoolExecutor(processes, Spawn(), initializer=_begin)
        self._drawn: dict[Origin, Future[Instance]] = {}

    def draw(self, now: Sequence[Origin], later: Sequence[Origin]) -> list[Instance]:
        """The instances of `now`. The workers then generate those of `later`, or without any go on
        with what was asked for before.

        Raises:
            RuntimeError: if a worker was killed.
        """
        try:
            self._request(now)
            instances = [self._drawn.pop(origin).result() for origin in now]
            for unused in self._drawn.keys() - set(later) if later else ():
                self._drawn.pop(unused).cancel()
            self._request(later)
        except BrokenProcessPool as error:
            raise RuntimeError(f"a worker of data.processes was killed: {error}") from None
        return instances

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)

    def _request(self, origins: Iterable[Origin]) -> None:
        for origin in origins:
            if origin not in self._drawn:
                self._drawn[origin] = self._pool.submit(_one, self._game, self._seed, *origin)


def _begin() -> None:
    """A worker ignores Ctrl-C, on which the trainer ends it, and ends with a killed trainer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer: Any = parent_process()
    Thread(target=lambda: (trainer.join(), os._exit(1)), daemon=True).start()


def _one(game: GameConfig, seed: int, stream: str, number: int) -> Instance:
    (instance,) = generated(stream, game=game, seed=seed, start=number, num=1)
    return instance
