"""The instances at the places of a step: curriculum, resampling and prioritized replay.

They depend only on the settings, the step and the rewards of earlier steps.
"""

import json
from pathlib import Path

import pytest

from dialop.matching.store import write_instances
from selfplay.config import Config, load_config
from selfplay.data.stream import TrainStream
from selfplay.errors import SettingsError

BOARD = ["game.size=3", "game.scale=false", "game.keep=all", "rollout.max_game_tokens=1000"]


def config_of(*overrides: str) -> Config:
    return load_config(None, ["model.scratch={}", "rollout.instances=8", *BOARD, *overrides])


def keys(stream: TrainStream, step: int, places: range = range(8)) -> list[str]:
    return [instance.key for instance in stream.step(step, places)]


def test_a_curriculum_starts_small_and_ends_with_the_game_itself() -> None:
    stages = "data.curriculum=[{until_step: 2, size: 2, p_observed: 1.0}, {until_step: 4, size: 2}]"
    stream = TrainStream(config_of(stages, "game.p_observed=0.4"))
    sizes = [{instance.size for instance in stream.step(step, range(8))} for step in range(6)]
    assert sizes == [{2}, {2}, {2}, {2}, {3}, {3}]
    num_observed = [
        sum(sum(row) for i in stream.step(step, range(8)) for mask in i.masks for row in mask)
        for step in range(4)
    ]
    assert num_observed[0] == num_observed[1] == 8 * 2 * 4
    assert max(num_observed[2:]) < 64, "the second stage is not fully observed"


def test_a_stage_with_a_share_changes_only_that_share_of_each_batch() -> None:
    stream = TrainStream(config_of("data.curriculum=[{until_step: 50, size: 2, share: 0.25}]"))
    sizes = [instance.size for step in range(50) for instance in stream.step(step, range(8))]
    small = sizes.count(2) / len(sizes)
    assert set(sizes) == {2, 3} and abs(small - 0.25) < 0.07, "400 draws, 3 standard errors"
    plain = TrainStream(config_of())
    assert plain.step(60, range(8)) == stream.step(60, range(8)), "after the stage nothing differs"


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


def played(stream: TrainStream, step: int, stds: dict[int, float]) -> list[str]:
    """Play a step with these reward standard deviations by place; 0 at the other places."""
    step_keys = keys(stream, step)
    stream.remember([stream.by_origin({k: stds.get(i, 0.0) for i, k in enumerate(step_keys)})])
    return step_keys


def test_instances_with_reward_variance_are_replayed_until_it_is_zero() -> None:
    stream = TrainStream(config_of("data.prioritized_replay=0.25", "data.replay_memory=3"))
    first = played(stream, 0, {1: 0.2, 4: 0.4, 5: 0.1, 6: 0.3})
    again = keys(stream, 1)
    remembered = {first[1], first[4], first[6]}
    assert len(stream.priorities) == 3 and first[5] not in remembered, (
        "the three with the largest values"
    )
    assert set(again[:2]) < remembered and not set(again[2:]) & set(first)
    assert len(set(again)) == 8
    drawn = [set(keys(stream, step)[:2]) for step in range(1, 200)]
    often = [sum(key in pair for pair in drawn) for key in (first[4], first[6], first[1])]
    assert often[0] > often[1] > often[2] > 0, "the larger the value, the more often"
    played(stream, 1, {})
    assert len(stream.priorities) == 1, "two were replayed and had zero variance"


def test_priorities_survive_a_checkpoint_and_are_the_same_on_every_rank() -> None:
    config = config_of("data.prioritized_replay=0.5")
    single, ranks = TrainStream(config), [TrainStream(config), TrainStream(config)]
    for step in range(4):
        instances = single.step(step, range(8))
        stds = {instance.key: 0.01 * (hash(instance.table) % 97) for instance in instances}
        single.remember([single.by_origin(stds)])
        parts = [[i.key for i in r.step(step, range(n, 8, 2))] for n, r in enumerate(ranks)]
        assert sorted(parts[0] + parts[1]) == sorted(instance.key for instance in instances)
        gathered = [
            rank.by_origin({key: stds[key] for key in part})
            for rank, part in zip(ranks, parts, strict=True)
        ]
        for rank in ranks:
            rank.remember(gathered)
    resumed = TrainStream(config)
    resumed.restore(json.loads(json.dumps(single.state())))
    assert (
        resumed.priorities == single.priorities == ranks[0].priorities == ranks[1].priorities != {}
    )
    assert keys(resumed, 4) == keys(single, 4) == keys(ranks[1], 4)
    off = TrainStream(config_of())
    off.step(0, range(8))
    assert off.by_origin(stds) == {}, "nothing is remembered without prioritized replay"
