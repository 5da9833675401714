"""The instances that a training step plays.

A step's instances have the numbers 0..rollout.instances-1, followed by the ones that methods add,
such as replacements of zero-variance groups. An instance depends on the settings, the step and its
number, never on the number of ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import parent_process
from threading import Thread
from typing import Any

from dialop.game import Instance
from dialop.starts import RecordedGame, checked_entries
from dialop.workers import Spawn
from selfplay.config import Config
from selfplay.config.options import with_options
from selfplay.config.plugins import own_call
from selfplay.data.instances import TRAIN, continued, generated, read_file, read_recorded
from selfplay.data.seeds import named_seed
from selfplay.errors import OwnFault, SettingsError

Place = tuple[int, int]  # a step, and the instance's number in it
RESAMPLED = "resampled"
KEY = "data.train"


def generated_instances(step: int, numbers: Sequence[int], config: Config) -> list[Instance]:
    """Instances of the stream that the run's seed selects, or of a second stream for numbers from
    rollout.instances on."""
    batch, num_more = config.rollout.instances, len(config.further_instances)
    made: list[Instance] = []
    for number in numbers:
        stream, start = TRAIN, step * batch + number
        if number >= batch:
            stream, start = RESAMPLED, step * num_more + number - batch
        made += generated(stream, game=config.game, seed=config.seed, start=start, num=1)
    return made


def made_instances(config: Config, step: int, numbers: Sequence[int]) -> list[Instance]:
    """The instances with these numbers from the function that `data.train` names. Raises OwnFault
    if a custom function returns instances that a step cannot use."""
    with own_call(KEY, config.data.train):
        made = with_options(KEY, config)(step, list(numbers), config)
        return checked_instances(made, len(numbers))


def checked_instances(made: Any, num: int) -> list[Instance]:
    """A function's result as instances. Raises OwnFault unless there are `num`, each with a unique
    key."""
    if not isinstance(made, list | tuple) or len(made) != num:
        got = f"{len(made)}" if isinstance(made, list | tuple) else repr(made)
        raise OwnFault(f"it must return a list of {num} instances, one per number, got {got:.200}")
    keys = set[str]()
    for one in made:
        if not isinstance(key := getattr(one, "key", None), str):
            raise OwnFault(f"its instances must be the game's, with a text `key`, got {one!r:.200}")
        if key in keys:
            raise OwnFault(f"its instances of a step must have unique keys, got {key} twice")
        keys.add(key)
    return list(made)


class TrainStream:
    """The training instances of each step: from a function, or from a file in shuffled epochs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._file: Sequence[Instance] | None = None
        self._prefetcher: Prefetcher | None = None
        if config.data.train_file:
            self._file = read_train_file(config)
        elif config.data.processes > 1:
            self._prefetcher = Prefetcher(config)
        self._recorded: Sequence[RecordedGame] = ()
        if config.data.start != 0:
            self._recorded = read_recorded(config.game, "data.start", config.data.train)

    def step(self, step: int, numbers: Iterable[int]) -> list[Instance]:
        """The instances of a step with these numbers; each rank passes its own numbers.

        All instances of a step are different. An epoch of a file has as many full steps as fit; the
        remaining instances differ from epoch to epoch.
        """
        batch, numbers = self._config.rollout.instances, list(numbers)
        if self._file is not None:
            return [self._of_file(self._file, step, number) for number in numbers]
        if self._prefetcher is None:
            return made_instances(self._config, step, numbers)
        later = [(step + 1, number) for number in numbers if number < batch]
        made = self._prefetcher.draw([(step, number) for number in numbers], later)
        with own_call(KEY, self._config.data.train):
            return checked_instances(made, len(made))

    def close(self) -> None:
        """End the prefetch workers."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _of_file(self, file: Sequence[Instance], step: int, number: int) -> Instance:
        """The file's instance for this number; for recorded games, with the moves that `data.start`
        replays."""
        batch, seed = self._config.rollout.instances, self._config.seed
        epoch, step_of_epoch = divmod(step, len(file) // batch)
        index = _order(len(file), seed, epoch)[(step_of_epoch * batch + number) % len(file)]
        if not self._recorded:
            return file[index]
        entries = checked_entries(self._config.data.start)
        instance: Instance = continued(self._recorded[index], entries, seed, step, index)
        return instance


@lru_cache(maxsize=2)
def _order(num: int, seed: int, epoch: int) -> Sequence[int]:
    """The indices 0..num-1 in an epoch's shuffled order."""
    return sorted(range(num), key=lambda i: named_seed("order", seed, epoch, i))


def read_train_file(config: Config) -> Sequence[Instance]:
    """The instances of data.train. Raises SettingsError if they are too few for one step."""
    path, batch = config.data.train, config.rollout.instances
    num_more = len(config.further_instances)
    instances: Sequence[Instance] = read_file(config.game, KEY, path)
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

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pool = ProcessPoolExecutor(config.data.processes, Spawn(), initializer=_begin)
        self._drawn: dict[Place, Future[Instance]] = {}

    def draw(self, now: Sequence[Place], later: Sequence[Place]) -> list[Instance]:
        """The instances of `now`. The workers then generate the instances of `later`; if it is
        empty, they continue with earlier requests.

        Raises:
            RuntimeError: if a worker was killed.
        """
        try:
            self._request(now)
            instances = [self._drawn.pop(place).result() for place in now]
            for unused in self._drawn.keys() - set(later) if later else ():
                self._drawn.pop(unused).cancel()
            self._request(later)
        except BrokenProcessPool as error:
            raise RuntimeError(f"a worker of data.processes was killed: {error}") from None
        return instances

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)

    def _request(self, places: Iterable[Place]) -> None:
        for place in places:
            if place not in self._drawn:
                self._drawn[place] = self._pool.submit(_one, self._config, *place)


def _begin() -> None:
    """A worker ignores Ctrl-C, because the trainer ends it, and exits if the trainer is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer: Any = parent_process()
    Thread(target=lambda: (trainer.join(), os._exit(1)), daemon=True).start()


def _one(config: Config, step: int, number: int) -> Instance:
    (instance,) = made_instances(config, step, [number])
    return instance
