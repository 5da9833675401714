"""The next step's instances, drawn in other processes while this step is played.

    python -m selfplay.data.prefetch      a worker: the run's seed, then jobs in; instances out

A hard 8x8 board takes 20 ms to draw, a batch of 64 more than a second. A worker reads its jobs from
a pipe that nobody but the trainer can write to, so it ends with the trainer, however that ends. An
instance is what it would be if it were drawn here: who draws it is nobody's seed. No torch.
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
# Workers share the cores with the trainer: their numerical libraries start no threads.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Games = Mapping[Origin, GameConfig]


class Prefetcher:
    """Workers that draw what the next step will ask for. They start when they are first needed."""

    def __init__(self, *, seed: int, processes: int) -> None:
        self._seed, self._processes = seed, processes
        self._workers: list[subprocess.Popen[bytes]] = []
        self._owing: list[subprocess.Popen[bytes]] = []  # those of whom an answer is due
        self._ready: dict[Origin, Instance] = {}

    def draw(self, now: Games, later: Games) -> dict[Origin, Instance]:
        """The instances of `now`; the workers go on with those of `later`, if there are any.

        Raises RuntimeError when a worker has ended; what it failed with is on the standard error.
        """
        self._collect()
        self._ask({origin: game for origin, game in now.items() if origin not in self._ready})
        self._collect()
        found = {origin: self._ready.pop(origin) for origin in now}
        if later:
            self._ready = {o: ready for o, ready in self._ready.items() if o in later}
            self._ask({origin: game for origin, game in later.items() if origin not in self._ready})
        return found

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        workers, self._workers, self._owing = self._workers, [], []
        for worker in workers:
            worker.kill()
            worker.communicate()

    def _ask(self, games: Games) -> None:
        if not games:
            return
        self._start()
        jobs, num = list(games.items()), len(self._workers)
        for place, worker in enumerate(self._workers[: len(jobs)]):
            self._send(worker, jobs[place::num])
            self._owing.append(worker)

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
            self._send(worker, self._seed)

    def _send(self, worker: subprocess.Popen[bytes], what: object) -> None:
        assert worker.stdin is not None
        try:
            pickle.dump(what, worker.stdin)
            worker.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(_ended(worker)) from None

    def _collect(self) -> None:
        """Everything that is still owed."""
        while self._owing:
            worker = self._owing.pop()
            assert worker.stdout is not None
            try:
                self._ready |= pickle.load(worker.stdout)
            except EOFError:
                raise RuntimeError(_ended(worker)) from None


def _ended(worker: subprocess.Popen[bytes]) -> str:
    code = worker.wait()
    return f"a process that draws instances ended with exit code {code}, see above (data.processes)"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    jobs, instances = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what anything prints must not mix with instances
    seed = cast(int, pickle.load(jobs))
    while True:
        try:
            asked = pickle.load(jobs)
        except EOFError:
            return
        drawn = {
            (source, number): generated(source, game=game, seed=seed, start=number, num=1)[0]
            for (source, number), game in asked
        }
        pickle.dump(drawn, instances)
        instances.flush()


if __name__ == "__main__":
    main()
