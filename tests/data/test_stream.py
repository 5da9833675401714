"""The instances of a step, with resampling: they depend only on the settings, step and number."""

from pathlib import Path

import pytest

from dialop.matching.store import write_instances
from selfplay.config import Config, load_config
from selfplay.data.stream import TrainStream
from selfplay.errors import SettingsError

BOARD = [
    "game.options.size=3",
    "game.options.scale=false",
    "game.options.keep=all",
    "rollout.max_game_tokens=1000",
]


def config_of(*overrides: str) -> Config:
    return load_config(None, ["model.scratch={}", "rollout.instances=8", *BOARD, *overrides])


def keys(stream: TrainStream, step: int, numbers: range = range(8)) -> list[str]:
    return [instance.key for instance in stream.step(step, numbers)]


def test_resampled_instances_occur_in_no_other_step() -> None:
    stream = TrainStream(config_of("algorithm.resample=4"))
    all_keys = [key for step in range(5) for key in keys(stream, step, range(12))]
    assert len(set(all_keys)) == 5 * 12
    assert keys(stream, 3) == keys(TrainStream(config_of()), 3), "the batch itself is the same"
    assert keys(stream, 2, range(9, 11)) == keys(stream, 2, range(12))[9:11]


def test_a_file_gives_resampled_instances_from_the_rest_of_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "boards.parquet"
    write_instances(path, TrainStream(config_of()).step(0, range(8)))
    wanted = f"data.train={path}"
    stream = TrainStream(config_of(wanted, "rollout.instances=3", "algorithm.resample=5"))
    for step in range(4):
        assert len(set(keys(stream, step))) == 8
    with pytest.raises(SettingsError, match=r"algorithm\.resample .*at most 5 .*got 6"):
        TrainStream(config_of(wanted, "rollout.instances=3", "algorithm.resample=6"))
