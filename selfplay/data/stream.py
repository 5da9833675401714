"""Which instances a training step plays: new ones, a curriculum's, and replayed ones.

The places of a step are 0..rollout.instances-1, then algorithm.resample more that replace
zero-variance groups. The instance at a place depends on the settings, the step and, with
data.prioritized_replay, on the rewards of earlier steps. It never depends on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dialop.game import Instance
from dialop.kit import Recorded
from dialop.starts import checked_entries
from selfplay.config import Config, GameConfig, StageConfig
from selfplay.data.instances import (
    GENERATED,
    TRAIN,
    begun,
    generated,
    read_file,
    read_recorded,
)
from selfplay.data.prefetch import Origin, Prefetcher
from selfplay.data.seeds import named_seed
from selfplay.errors import SettingsError

RESAMPLED, FILE = "resampled", "file"
# Remembered instances, with the standard deviation of their groups' rewards.
Priorities = dict[Origin, float]


class TrainStream:
    """The training instances of each step: generated online, or a file read in shuffled epochs.

    `priorities` holds the instances that prioritized replay remembers, the same on all ranks.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.priorities: Priorities = {}
        self._origins: dict[str, Origin] = {}  # by key, for the instances of the current step
        self._step = -1
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._file: Sequence[Instance] | None = None
        self._prefetcher: Prefetcher | None = None
        if config.data.train != GENERATED:
            self._file = _read(
                config.data.train,
                config.game,
                batch=config.rollout.instances,
                num_resampled=config.algorithm.resample,
            )
        elif config.data.processes > 1:
            self._prefetcher = Prefetcher(seed=config.seed, processes=config.data.processes)
        self._recorded: Sequence[Recorded] = ()
        if config.data.start.entries != 0:
            self._recorded = read_recorded(config.game, "data.start", config.data.train)

    def step(self, step: int, places: Iterable[int]) -> list[Instance]:
        """The instances at these places of a step; each rank passes its own places.

        All instances of a step are different. An epoch of a file has as many full steps as fit; the
        instances left over differ from epoch to epoch.
        """
        if step != self._step:
            self._origins, self._step = {}, step
        batch, places = self._config.rollout.instances, list(places)
        replayed = self._replayed(step)
        origins = [
            replayed[place] if place < min(batch, len(replayed)) else self._new(step, place)
            for place in places
        ]
        if self._prefetcher is not None:
            later = [self._new(step + 1, place) for place in places if place < batch]
            by_origin = self._prefetcher.draw(self._games(origins), self._games(later))
            instances = [by_origin[origin] for origin in origins]
        else:
            instances = [self._instance(origin, step) for origin in origins]
        self._origins |= {i.key: origin for i, origin in zip(instances, origins, strict=True)}
        return instances

    def close(self) -> None:
        """End the prefetch workers."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def by_origin(self, by_key: Mapping[str, float]) -> Priorities:
        """Values of this rank's instances of the current step, by origin instead of by key.

        The values are standard deviations of rewards. `remember` takes those of all ranks. Empty
        without prioritized replay.
        """
        if not self._config.data.prioritized_replay:
            return {}
        return {origin: by_key[key] for key, origin in self._origins.items() if key in by_key}

    def remember(self, parts: Sequence[Priorities]) -> None:
        """Update the priorities with a step's reward standard deviations, one mapping per rank.

        Keeps the data.replay_memory instances with the largest values. A replayed instance gets its
        new value and is dropped if that is 0.
        """
        merged = {**self.priorities, **{o: s for part in parts for o, s in part.items()}}
        order = sorted(merged, key=lambda o: (-merged[o], o))[: self._config.data.replay_memory]
        self.priorities = {origin: merged[origin] for origin in order if merged[origin] > 0.0}

    def state(self) -> list[tuple[str, int, float]]:
        """The priorities as plain values for a checkpoint."""
        return [(*origin, std) for origin, std in self.priorities.items()]

    def restore(self, state: Sequence[Sequence[object]]) -> None:
        """Set the priorities to a value of `state`, which may have passed through JSON."""
        self.priorities = {(str(n), int(str(i))): float(str(std)) for n, i, std in state}

    def _replayed(self, step: int) -> list[Origin]:
        """The remembered instances that a step replays, sampled without replacement.

        Probabilities are proportional to the priorities w. Efraimidis and Spirakis (2006): draw a
        uniform u for each instance and take those with the largest u^(1/w).
        """
        config = self._config
        num = round(config.data.prioritized_replay * config.rollout.instances)
        if not num or not self.priorities:
            return []
        num_places = config.rollout.instances + config.algorithm.resample
        new = {self._new(step, place) for place in range(num_places)}
        candidates = [
            origin for origin in self.priorities if self._file is None or origin not in new
        ]

        def log_key(origin: Origin) -> float:
            uniform = (named_seed(config.seed, "edge", step, *origin) + 0.5) / 2**63
            return math.log(uniform) / self.priorities[origin]

        return sorted(candidates, key=log_key, reverse=True)[:num]

    def _new(self, step: int, place: int) -> Origin:
        """The origin at a place of a step without replay."""
        batch, num_resampled = self._config.rollout.instances, self._config.algorithm.resample
        if self._file is not None:
            epoch, step_of_epoch = divmod(step, len(self._file) // batch)
            index = (step_of_epoch * batch + place) % len(self._file)
            return FILE, self._order(epoch)[index]
        if place < batch:
            return TRAIN, step * batch + place
        return RESAMPLED, step * num_resampled + place - batch

    def _instance(self, origin: Origin, step: int) -> Instance:
        source, number = origin
        if source == FILE and self._recorded:
            entries = checked_entries(self._config.data.start.entries)
            names = (self._config.seed, step, number)
            continued: Instance = begun(self._recorded[number], entries, *names)
            return continued
        if source == FILE:
            assert self._file is not None
            return self._file[number]
        (game,) = self._games([origin]).values()
        (instance,) = generated(source, game=game, seed=self._config.seed, start=number, num=1)
        return instance

    def _games(self, origins: Iterable[Origin]) -> dict[Origin, GameConfig]:
        """The game settings for each instance of a generated stream."""
        batches = {
            TRAIN: self._config.rollout.instances,
            RESAMPLED: self._config.algorithm.resample,
        }
        return {
            (source, number): game_at(
                self._config.game,
                number // batches[source],
                (source, number),
                curriculum=self._config.data.curriculum,
                seed=self._config.seed,
            )
            for source, number in origins
        }

    def _order(self, epoch: int) -> list[int]:
        """The indices of the file in the shuffled order of an epoch; caches the last epoch."""
        assert self._file is not None
        if self._shuffled[0] != epoch:
            indices, seed = range(len(self._file)), self._config.seed
            order = sorted(indices, key=lambda i: named_seed("order", seed, epoch, i))
            self._shuffled = epoch, order
        return self._shuffled[1]


def game_at(
    game: GameConfig,
    step: int,
    origin: Origin,
    *,
    curriculum: Sequence[StageConfig],
    seed: int,
) -> GameConfig:
    """The game settings for a new instance of a step.

    A stage of the curriculum changes the settings of its `share` of the instances; all others use
    `game` itself.
    """
    for stage in curriculum:
        if step < stage.until_step:
            uniform = named_seed(seed, "curriculum", *origin) / 2**63
            if uniform >= stage.share:
                break
            return replace(
                game,
                size=game.size if stage.size is None else stage.size,
                p_observed=game.p_observed if stage.p_observed is None else stage.p_observed,
                keep=stage.keep or game.keep,
            )
    return game


def _read(path: str, game: GameConfig, *, batch: int, num_resampled: int) -> Sequence[Instance]:
    """The instances of data.train. Raises SettingsError if they are too few for one step."""
    instances: Sequence[Instance] = read_file(game, "data.train", path)
    if len(instances) < batch:
        raise SettingsError(
            f"rollout.instances must be at most the {len(instances)} instances of {path}, "
            f"got {batch}"
        )
    if len(instances) < batch + num_resampled:
        raise SettingsError(
            f"algorithm.resample must be at most {len(instances) - batch} (the {len(instances)} "
            f"instances of {path} minus rollout.instances), got {num_resampled}"
        )
    return instances
