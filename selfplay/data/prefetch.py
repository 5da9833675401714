"""Prefetch: worker processes generate the next step's instances during the current step.

A hard 8x8 board takes 20 ms to generate, a batch of 64 more than a second. The instances do not
depend on the process that generates them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

from dialop.game import Instance
from selfplay.config import GameConfig
from selfplay.data.instances import generated

Origin = tuple[str, int]  # a stream's name and the instance's number in it


class Prefetcher:
    """Worker processes that generate instances ahead of time. They start at the first `draw`."""

    def __init__(self, game: GameConfig, *, seed: int, processes: int) -> None:
        self._game, self._seed = game, seed
        # Spawn, because forking a process with running threads (torch, an engine) can hang.
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin)
        self._drawn: dict[Origin, Future[Instance]] = {}

    def draw(self, now: Sequence[Origin], later: Iterable[Origin]) -> list[Instance]:
        """The instances of `now`. The workers then generate those of `later`.

        Raises:
            RuntimeError: if a worker was killed.
        """
        try:
            self._request(now)
            instances = [self._drawn.pop(origin).result() for origin in now]
            for unused in self._drawn.keys() - set(later):
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
