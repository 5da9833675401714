"""Prefetch: workers generate the same instances, and end with the trainer."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from selfplay.config import Config, load_config
from selfplay.data.stream import TrainStream
from tests.helpers.processes import left

ROOT = Path(__file__).resolve().parents[2]


SETTINGS = (
    *("game.options.size=3", "game.options.keep=all", "rollout.max_game_tokens=1000"),
    *("model.scratch={}", "rollout.instances=4"),
)


def config_of(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def test_workers_give_the_instances_of_one_process_and_one_that_is_killed_stops_the_run() -> None:
    """Batches in order, extra places of a step, a jump as after a resume, other ranks' places. The
    extra places leave the next step's instances, which were asked for, to that step."""
    config = config_of("data.processes=2", "methods.resample.instances=3")
    in_process = TrainStream(config_of("methods.resample.instances=3"))
    with closing(TrainStream(config)) as stream:
        prefetcher, asked = stream._prefetcher, {}
        calls = [(0, range(4)), (0, range(4, 7)), (1, range(4)), (9, range(4)), (10, range(2))]
        for step, places in [*calls, (11, range(2, 4))]:
            assert stream.step(step, places) == in_process.step(step, places)
            asked = asked or dict(prefetcher._drawn)
            assert step or (len(asked) == 4 and prefetcher._drawn == asked)
        with pytest.raises(ValueError, match="seed and index must be at least 0"):
            prefetcher.draw([(0, -1)], [])
        for pid in prefetcher._pool._processes:
            psutil.Process(pid).kill()
        with pytest.raises(RuntimeError, match=r"data\.processes was killed"):
            prefetcher.draw([(0, n) for n in range(4, 8)], [])


def test_workers_end_with_a_killed_trainer() -> None:
    script = (
        "import sys, time\n"
        "from selfplay.config import load_config\n"
        "from selfplay.data.stream import TrainStream\n"
        "stream = TrainStream(load_config(None, sys.argv[1:]))\n"
        "stream.step(0, range(4))\n"
        "print(*stream._prefetcher._pool._processes, flush=True)\n"
        "time.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, *SETTINGS, "data.processes=2"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2 and all(worker.is_running() for worker in workers)
    trainer.kill()
    trainer.wait()
    assert left(workers) == []
