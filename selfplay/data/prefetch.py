"""Prefetch: worker processes generate the next step's instances during the current step.

    python -m selfplay.data.prefetch    a worker: reads the run's seed and module path, then jobs

A hard 8x8 board takes 20 ms to generate, a batch of 64 more than a second. Only the trainer holds
the write end of a worker's stdin, so the worker ends when the trainer ends for any reason. The
instances do not depend on the process that generates them.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from dialop.game import Instance
from selfplay.config import GameConfig
from selfplay.data.instances import generated

Origin = tuple[str, int]  # a stream's name and the instance's number in it
# Workers share the cores with the trainer, so their numerical libraries use one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Games = Mapping[Origin, GameConfig]


class Prefetcher:
    """Worker processes that generate instances ahead of time. They start at the first `draw`."""

    def __init__(self, *, seed: int, processes: int) -> None:
        self._seed, self._processes = seed, processes
        self._workers: list[subprocess.Popen[bytes]] = []
        self._busy: list[subprocess.Popen[bytes]] = []  # workers that have not answered yet
        self._ready: dict[Origin, Instance] = {}

    def draw(self, now: Games, later: Games) -> dict[Origin, Instance]:
        """The instances of `now`. The workers then prefetch those of `later`.

        Raises:
            RuntimeError: if a worker has ended; its error is on the standard error.
        """
        self._collect()
        self._request({origin: game for origin, game in now.items() if origin not in self._ready})
        self._collect()
        instances = {origin: self._ready.pop(origin) for origin in now}
        if later:
            self._ready = {o: ready for o, ready in self._ready.items() if o in later}
            self._request({o: game for o, game in later.items() if o not in self._ready})
        return instances

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        workers, self._workers, self._busy = self._workers, [], []
        for worker in workers:
            worker.kill()
            worker.communicate()

    def _request(self, games: Games) -> None:
        if not games:
            return
        self._start()
        jobs, num = list(games.items()), len(self._workers)
        for place, worker in enumerate(self._workers[: len(jobs)]):
            self._send(worker, jobs[place::num])
            self._busy.append(worker)

    def _start(self) -> None:
        while len(self._workers) < self._processes:
            worker = subprocess.Popen(
                [sys.executable, "-m", "selfplay.data.prefetch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | ONE_THREAD,
            )
            self._workers.append(worker)
            self._send(worker, (self._seed, sys.path))

    def _send(self, worker: subprocess.Popen[bytes], message: object) -> None:
        assert worker.stdin is not None
        try:
            pickle.dump(message, worker.stdin)
            worker.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(_ended(worker)) from None

    def _collect(self) -> None:
        """Wait for all outstanding answers."""
        while self._busy:
            worker = self._busy.pop()
            assert worker.stdout is not None
            try:
                self._ready |= pickle.load(worker.stdout)
            except EOFError:
                raise RuntimeError(_ended(worker)) from None


def _ended(worker: subprocess.Popen[bytes]) -> str:
    code = worker.wait()
    return f"a prefetch worker ended with exit code {code}, see above (data.processes)"


def main() -> None:
    """Answer each job, a list of (origin, settings), with a dict of instances, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the trainer ends its workers
    jobs, instances = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # keep printed text out of the pickled stream
    seed, path = cast(tuple[int, list[str]], pickle.load(jobs))
    sys.path += [folder for folder in path if folder not in sys.path]  # for the user's own games
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        drawn = {
            (source, number): generated(source, game=game, seed=seed, start=number, num=1)[0]
            for (source, number), game in job
        }
        pickle.dump(drawn, instances)
        instances.flush()


if __name__ == "__main__":
    main()
