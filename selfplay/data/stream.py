"""Which instances a training step plays: fresh ones, a curriculum's, and those worth another look.

A step's places are 0..rollout.instances-1, then algorithm.resample more for groups that turned out
flat. What stands at a place depends on the settings, the step and, with data.prioritized_replay, on what earlier
steps showed, never on the number of ranks. Knows games by their instances only; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dialop.game import Instance
from dialop.matching.starts import checked_entries
from selfplay.config import Config, GameConfig, StageConfig
from selfplay.config.settings import SettingsError
from selfplay.data.instances import (
    GENERATED,
    TRAIN,
    begun,
    check_files,
    generated,
    read_file,
    read_recorded,
)
from selfplay.data.prefetch import Origin, Prefetcher
from selfplay.data.seeds import named_seed
from selfplay.games import Recorded

RESAMPLED, FILE = "resampled", "file"
Priorities = dict[
    Origin, float
]  # remembered instances and how far the rewards of their groups spread


class TrainStream:
    """The training instances of each step: generated online, or a file read in seeded epochs.

    What it remembers of earlier steps is `edge`; all ranks hold the same.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.priorities: Priorities = {}
        self._drawn: dict[str, Origin] = {}  # the instances of the step in play, by key
        self._step = -1
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._file: Sequence[Instance] | None = None
        check_files(config.game, config.data)
        self._prefetcher: Prefetcher | None = None
        if config.data.train != GENERATED:
            self._file = _read(config)
        elif config.data.processes > 1:
            self._prefetcher = Prefetcher(seed=config.seed, processes=config.data.processes)
        self._recorded: Sequence[Recorded] = ()
        if config.data.start.entries != 0:
            self._recorded = read_recorded(config.game, "data.start", config.data.train)

    def step(self, step: int, places: Iterable[int]) -> list[Instance]:
        """The instances at these places of a step (each rank asks for its own).

        No step holds an instance twice. An epoch of a file is whole steps; each epoch's shuffle
        leaves out another rest.
        """
        if step != self._step:
            self._drawn, self._step = {}, step
        batch, places = self._config.rollout.instances, list(places)
        again = self._again(step)
        origins = [
            again[place] if place < min(batch, len(again)) else self._fresh(step, place)
            for place in places
        ]
        if self._prefetcher is not None:
            later = [self._fresh(step + 1, place) for place in places if place < batch]
            drawn = self._prefetcher.draw(self._games(origins), self._games(later))
            found = [drawn[origin] for origin in origins]
        else:
            found = [self._instance(origin, step) for origin in origins]
        self._drawn |= {i.key: origin for i, origin in zip(found, origins, strict=True)}
        return found

    def close(self) -> None:
        """End the processes that draw ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def by_origin(self, by_key: Mapping[str, float]) -> Priorities:
        """How far the groups' rewards of this rank's instances of the step spread, by their origin;
        what every rank says goes into `remember`."""
        if not self._config.data.prioritized_replay:
            return {}
        return {origin: by_key[key] for key, origin in self._drawn.items() if key in by_key}

    def remember(self, parts: Sequence[Priorities]) -> None:
        """Take in a step's spreads of all ranks. The instances that spread most are kept; one that
        was played again counts with what it showed last."""
        merged = {**self.priorities, **{o: s for part in parts for o, s in part.items()}}
        order = sorted(merged, key=lambda o: (-merged[o], o))[: self._config.data.replay_memory]
        self.priorities = {origin: merged[origin] for origin in order if merged[origin] > 0.0}

    def state(self) -> list[tuple[str, int, float]]:
        """What is remembered, as plain values for a checkpoint."""
        return [(*origin, spread) for origin, spread in self.priorities.items()]

    def restore(self, state: Sequence[Sequence[object]]) -> None:
        """Take over what `state` gave, before or after it went through JSON."""
        self.priorities = {(str(n), int(str(i))): float(str(spread)) for n, i, spread in state}

    def _again(self, step: int) -> list[Origin]:
        """The remembered instances of a step, without a second of any: drawn with chances in
        proportion to their spread (Efraimidis and Spirakis, 2006: the largest u^(1/w) win)."""
        config = self._config
        num = round(config.data.prioritized_replay * config.rollout.instances)
        if not num or not self.priorities:
            return []
        fresh = {
            self._fresh(step, p)
            for p in range(config.rollout.instances + config.algorithm.resample)
        }
        open_to_draw = [
            origin for origin in self.priorities if self._file is None or origin not in fresh
        ]

        def chance(origin: Origin) -> float:
            uniform = (named_seed(config.seed, "edge", step, *origin) + 0.5) / 2**63
            return math.log(uniform) / self.priorities[origin]

        return sorted(open_to_draw, key=chance, reverse=True)[:num]

    def _fresh(self, step: int, place: int) -> Origin:
        batch, spare = self._config.rollout.instances, self._config.algorithm.resample
        if self._file is not None:
            epoch, step_of_epoch = divmod(step, len(self._file) // batch)
            at = (step_of_epoch * batch + place) % len(self._file)
            return FILE, self._order(epoch)[at]
        if place < batch:
            return TRAIN, step * batch + place
        return RESAMPLED, step * spare + place - batch

    def _instance(self, origin: Origin, played_at: int) -> Instance:
        source, number = origin
        if source == FILE and self._recorded:
            entries = checked_entries(self._config.data.start.entries)
            names = (self._config.seed, played_at, number)
            begun_there: Instance = begun(self._recorded[number], entries, *names)
            return begun_there
        if source == FILE:
            assert self._file is not None
            return self._file[number]
        (game,) = self._games([origin]).values()
        (instance,) = generated(source, game=game, seed=self._config.seed, start=number, num=1)
        return instance

    def _games(self, origins: Iterable[Origin]) -> dict[Origin, GameConfig]:
        """What to draw at each of these places of a generated stream."""
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
        """A seeded shuffle of the file for one epoch, the latest kept."""
        assert self._file is not None
        if self._shuffled[0] != epoch:
            names, seed = range(len(self._file)), self._config.seed
            order = sorted(names, key=lambda i: named_seed("order", seed, epoch, i))
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
    """The game's settings for a fresh instance of a step: those of the curriculum's stage, or for
    the rest of its batch the run's own."""
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


def _read(config: Config) -> Sequence[Instance]:
    path, places = config.data.train, config.rollout.instances + config.algorithm.resample
    instances: Sequence[Instance] = read_file(config.game, "data.train", path)
    if len(instances) < config.rollout.instances:
        raise SettingsError(
            f"rollout.instances must be at most the {len(instances)} instances of {path}, "
            f"got {config.rollout.instances}"
        )
    if len(instances) < places:
        raise SettingsError(
            f"algorithm.resample must be at most {len(instances) - config.rollout.instances} "
            f"(the {len(instances)} instances of {path} less a batch), got {config.algorithm.resample}"
        )
    return instances
