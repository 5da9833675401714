"""Curriculum, further draws and remembered instances: what stands at a step's places, and that it
depends on nothing but settings, step and what earlier steps showed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dialop.matching.store import write_instances
from selfplay.config import Config, load_config
from selfplay.config.settings import SettingsError
from selfplay.data.stream import TrainStream

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
    seen = [
        sum(sum(row) for i in stream.step(step, range(8)) for mask in i.masks for row in mask)
        for step in range(4)
    ]
    assert seen[0] == seen[1] == 8 * 2 * 4 and max(seen[2:]) < 64, "observability rises, too"


def test_a_stage_with_a_share_leaves_the_rest_of_each_batch_as_the_game_says() -> None:
    stream = TrainStream(config_of("data.curriculum=[{until_step: 50, size: 2, share: 0.25}]"))
    sizes = [instance.size for step in range(50) for instance in stream.step(step, range(8))]
    small = sizes.count(2) / len(sizes)
    assert set(sizes) == {2, 3} and abs(small - 0.25) < 0.07, "400 draws, 3 standard errors"
    plain = TrainStream(config_of())
    assert plain.step(60, range(8)) == stream.step(60, range(8)), "after it nothing differs"


def test_a_curriculum_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"data\.curriculum must rise in until_step"):
        config_of("data.curriculum=[{until_step: 4}, {until_step: 2}]")
    with pytest.raises(SettingsError, match=r"at most game\.size 3.*got 4"):
        config_of("data.curriculum=[{until_step: 4, size: 4}]")
    with pytest.raises(SettingsError, match=r"needs data\.train generated"):
        config_of("data.curriculum=[{until_step: 4}]", f"data.train={tmp_path}")


def test_further_places_of_a_step_hold_instances_of_no_other() -> None:
    stream = TrainStream(config_of("algorithm.resample=4"))
    found = [key for step in range(5) for key in keys(stream, step, range(12))]
    assert len(set(found)) == 5 * 12
    assert keys(stream, 3) == keys(TrainStream(config_of()), 3), "the batch itself is the same"
    assert keys(stream, 2, range(9, 11)) == keys(stream, 2, range(12))[9:11]


def test_a_file_gives_further_places_from_the_rest_of_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "boards.parquet"
    write_instances(path, TrainStream(config_of()).step(0, range(8)))
    wanted = f"data.train={path}"
    stream = TrainStream(config_of(wanted, "rollout.instances=3", "algorithm.resample=5"))
    for step in range(4):
        assert len(set(keys(stream, step))) == 8
    with pytest.raises(SettingsError, match=r"algorithm\.resample must be at most 5 .*got 6"):
        TrainStream(config_of(wanted, "rollout.instances=3", "algorithm.resample=6"))


def played(stream: TrainStream, step: int, spreads: dict[int, float]) -> list[str]:
    """Play a step; the instance at each place of `spreads` spread so far, the others not at all."""
    found = keys(stream, step)
    stream.remember([stream.by_origin({k: spreads.get(i, 0.0) for i, k in enumerate(found)})])
    return found


def test_instances_whose_groups_spread_come_back_and_leave_when_they_no_longer_do() -> None:
    stream = TrainStream(config_of("data.prioritized_replay=0.25", "data.replay_memory=3"))
    first = played(stream, 0, {1: 0.2, 4: 0.4, 5: 0.1, 6: 0.3})
    again = keys(stream, 1)
    remembered = {first[1], first[4], first[6]}
    assert len(stream.priorities) == 3 and first[5] not in remembered, "the three that spread most"
    assert set(again[:2]) < remembered and not set(again[2:]) & set(first)
    assert len(set(again)) == 8
    drawn = [set(keys(stream, step)[:2]) for step in range(1, 200)]
    often = [sum(key in pair for pair in drawn) for key in (first[4], first[6], first[1])]
    assert often[0] > often[1] > often[2] > 0, "the more they spread, the more often"
    played(stream, 1, {})
    assert len(stream.priorities) == 1, "two were played again and turned out flat"


def test_what_is_remembered_survives_a_checkpoint_and_is_the_same_on_every_rank() -> None:
    config = config_of("data.prioritized_replay=0.5")
    whole, ranks = TrainStream(config), [TrainStream(config), TrainStream(config)]
    for step in range(4):
        found = whole.step(step, range(8))
        spread = {instance.key: 0.01 * (hash(instance.table) % 97) for instance in found}
        whole.remember([whole.by_origin(spread)])
        parts = [[i.key for i in r.step(step, range(n, 8, 2))] for n, r in enumerate(ranks)]
        assert sorted(parts[0] + parts[1]) == sorted(instance.key for instance in found)
        said = [
            rank.by_origin({key: spread[key] for key in part})
            for rank, part in zip(ranks, parts, strict=True)
        ]
        for rank in ranks:
            rank.remember(said)
    resumed = TrainStream(config)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert (
        resumed.priorities == whole.priorities == ranks[0].priorities == ranks[1].priorities != {}
    )
    assert keys(resumed, 4) == keys(whole, 4) == keys(ranks[1], 4)
    off = TrainStream(config_of())
    off.step(0, range(8))
    assert off.by_origin(spread) == {}, "nothing is remembered unless it is asked for"
