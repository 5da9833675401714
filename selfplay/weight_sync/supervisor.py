"""Restarts engines that fail, with the trainer's current weights.

A failed engine is killed and started again; then all engines sleep and get the weights as in every
step. Its work is repeated: a push is sent again, and unfinished games are played again from their
start with the same named seeds. The other ranks wait meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from selfplay.config import EngineConfig
from selfplay.distributed import World
from selfplay.engines.base import Engine
from selfplay.errors import EngineFault
from selfplay.learner.learner import Learner
from selfplay.weight_sync.faults import EngineLost, EnginesFailed, agreed
from selfplay.weight_sync.handover import sleep_engine, sync_and_wake
from selfplay.weight_sync.offload import Offload

T = TypeVar("T")
MAX_FAILURES = 3  # in a row; the last of them ends the run


class Restarts:
    """Restarts this run's engines when they fail. Every rank must call each method. `engine` is
    None on a rank that shares another rank's."""

    def __init__(
        self, learner: Learner, engine: Engine | None, offload: Offload, *, config: EngineConfig
    ) -> None:
        self._learner, self._engine = learner, engine
        self._offload, self._config = offload, config
        self._version = 0  # of the last push
        self._num = 0

    def push(self, version: int) -> None:
        """`sync_and_wake` with this version of the weights; a failed engine is restarted first.

        Raises EngineLost after the last failure in a row, with every engine asleep and nothing
        offloaded, and EngineDisagrees as `sync_and_wake` does.
        """
        self._version = version
        for number in range(1, MAX_FAILURES + 1):
            try:
                sync_and_wake(
                    self._learner, self._engine, self._offload, version=version, config=self._config
                )
            except EnginesFailed as failed:
                self._restart_failed(failed, number)
            else:
                return

    def retry(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which uses this rank's engine and no collective.

        If an engine fails, it is restarted with the weights of the last push, and every rank
        repeats the attempt. An attempt that keeps its finished games
        (`rollout.driver.FinishedGames`) does not play them again. Raises like `push`.
        """

        def recover(failed: EnginesFailed, number: int) -> None:
            self._restart_failed(failed, number)
            self.push(self._version)

        return _retry(attempt, recover, self._learner.world)

    def take_num(self) -> float:
        """Restarts of all ranks' engines since the last call."""
        num, self._num = self._num, 0
        return float(num)

    def _restart_failed(self, failed: EnginesFailed, number: int) -> None:
        """Restart the failed engines after the `number`-th failure in a row; all engines sleep and
        nothing is offloaded afterwards. Raises EngineLost after the last one."""
        world = self._learner.world
        self._num += _restart(self._engine, failed, number, world)
        sleep_engine(self._engine, self._offload, world)
        _check_not_last(failed, number)


class FolderRestarts:
    """Restarts failed engines that keep the weights of their folders. Every rank must call."""

    def __init__(self, engine: Engine | None, world: World) -> None:
        self._engine, self._world = engine, world

    def retry(self, attempt: Callable[[], T]) -> T:
        """As `Restarts.retry`; a restarted engine reads its folder again."""

        def recover(failed: EnginesFailed, number: int) -> None:
            _restart(self._engine, failed, number, self._world)
            _check_not_last(failed, number)

        return _retry(attempt, recover, self._world)


def _retry(
    attempt: Callable[[], T], recover: Callable[[EnginesFailed, int], None], world: World
) -> T:
    """Attempt until no rank's engine fails; `recover` raises after the last failure in a row."""
    for number in range(1, MAX_FAILURES + 1):
        try:
            with agreed(world):
                answer = attempt()
        except EnginesFailed as failed:
            recover(failed, number)
        else:
            return answer
    raise AssertionError("recover raises after the last attempt")


def _restart(engine: Engine | None, failed: EnginesFailed, number: int, world: World) -> int:
    """Print what failed and restart this rank's engine if it failed; returns the number of restarts
    on all ranks. After the last failure in a row the engine is closed instead."""
    last = number == MAX_FAILURES
    if world.rank == 0:
        end = "" if last else ": it is restarted"
        text = f"engine failure {number} of {MAX_FAILURES} in a row, {failed}{end}"
        print(text, file=sys.stderr, flush=True)
    if engine is not None and world.rank in failed.causes:
        if last:
            engine.close()  # frees its memory, which saving may need
        else:
            if world.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()  # the engine's memory is a share of the free memory
            try:
                engine.restart()
            except EngineFault as error:  # the next call fails and counts as the next failure
                print(f"engine restart: {error}", file=sys.stderr, flush=True)
    return 0 if last else len(failed.causes)


def _check_not_last(failed: EnginesFailed, number: int) -> None:
    """Raise EngineLost after the last failure in a row."""
    if number == MAX_FAILURES:
        raise EngineLost(f"an engine failed {number} times in a row, last {failed}")
