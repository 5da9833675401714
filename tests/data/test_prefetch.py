"""Prefetch: workers generate the same instances, and end with the trainer."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from selfplay.config import Config, load_config
from selfplay.data.stream import Prefetcher, TrainStream
from tests.helpers.processes import left

ROOT = Path(__file__).resolve().parents[2]


SETTINGS = (
    *("game.options.size=3", "game.options.keep=all", "rollout.max_game_tokens=1000"),
    *("model.scratch={}", "rollout.instances=4"),
)


def config_of(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


@pytest.fixture
def stream() -> Iterator[TrainStream]:
    drawing = TrainStream(config_of("data.processes=2", "methods.resample.instances=3"))
    yield drawing
    drawing.close()


def test_prefetched_instances_equal_those_generated_in_process(stream: TrainStream) -> None:
    """Batches in order, extra places of a step, a jump as after a resume, other ranks' places."""
    in_process = TrainStream(config_of("methods.resample.instances=3"))
    calls = [(0, range(4)), (1, range(4)), (1, range(4, 7)), (2, range(4)), (9, range(4))]
    for step, places in [*calls, (10, range(2)), (11, range(2, 4))]:
        assert stream.step(step, places) == in_process.step(step, places)


def test_places_of_resampling_leave_the_next_step_to_its_workers(stream: TrainStream) -> None:
    """The instances of the next step that were asked for are those that its call then takes."""
    stream.step(0, range(4))
    asked = dict(stream._prefetcher._drawn)
    stream.step(0, range(4, 7))
    assert len(asked) == 4 and stream._prefetcher._drawn == asked


def test_a_worker_that_fails_or_is_killed_stops_the_run() -> None:
    prefetcher = Prefetcher(config_of("data.processes=2"))
    with pytest.raises(ValueError, match="seed and index must be at least 0"):
        prefetcher.draw([(0, -1)], [])
    prefetcher.draw([(0, n) for n in range(4)], [])  # all workers have started
    for process in psutil.Process().children():
        if "spawn_main" in " ".join(process.cmdline()):
            process.kill()
    with pytest.raises(RuntimeError, match=r"data\.processes was killed"):
        prefetcher.draw([(0, n) for n in range(4, 8)], [])
    prefetcher.close()


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
