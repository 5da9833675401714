"""Instance streams depend on names only, are split over ranks, and never overlap."""

from pathlib import Path
from typing import Any

import pytest

from dialop.matching.game import MatchingInstance
from dialop.matching.kit import write as write_instances
from selfplay.config import Config, load_config
from selfplay.data.instances import (
    HELD_OUT,
    TEACHERS,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    evaluation_instances,
    generated,
    trained_on,
)
from selfplay.data.seeds import named_seed
from selfplay.data.stream import TrainStream
from selfplay.distributed.world import Replica
from selfplay.errors import SettingsError
from tests.helpers.house import ROOT

ROOM = ["model.scratch={}", "rollout.max_game_tokens=1000"]
BOARD = ["game.options.size=3", "game.options.scale=false", "game.options.keep=all"]


def config_of(*overrides: str) -> Config:
    return load_config(None, ["rollout.instances=5", *ROOM, *BOARD, *overrides])


def keys(instances: list[MatchingInstance]) -> list[str]:
    return [instance.key for instance in instances]


def content(instance: MatchingInstance) -> tuple[object, ...]:
    return instance.table, instance.masks, instance.scales, instance.first_seat


def test_a_named_seed_depends_on_every_name_and_its_position() -> None:
    assert named_seed(0, "play", 1) == named_seed(0, "play", 1)
    others = [(0, "play", 2), (1, "play", 0), (0, 1, "play"), (0, "play", "1"), (0, "play")]
    assert len({named_seed(*names) for names in [(0, "play", 1), *others]}) == 6
    assert 0 <= named_seed("x") < 2**63


def test_a_step_is_the_same_whatever_was_drawn_before() -> None:
    straight, jumped = TrainStream(config_of()), TrainStream(config_of())
    steps = [straight.step(step, range(5)) for step in range(4)]
    assert jumped.step(3, range(5)) == steps[3]
    assert jumped.step(1, [4, 2]) == [steps[1][4], steps[1][2]]
    all_keys = [key for step in steps for key in keys(step)]
    assert len(set(all_keys)) == 20, "no instance occurs twice"
    assert keys(TrainStream(config_of("seed=1")).step(0, range(5))) != keys(steps[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_share_a_step_without_overlap(num_ranks: int) -> None:
    shares = [Replica(rank, num_ranks, 1, True, None).share(5) for rank in range(num_ranks)]
    assert sorted(place for share in shares for place in share) == list(range(5))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_held_out_games_that_training_plays_are_told(tmp_path: Path) -> None:
    drawn = generated(TRAIN, game=config_of().game, seed=0, start=0, num=12)
    files = {"train": drawn[:8], "apart": drawn[8:], "both": drawn[6:]}
    for name, instances in files.items():
        write_instances(tmp_path / f"{name}.parquet", instances)
    train = f"data.train={tmp_path}/train.parquet"
    config = config_of(train, f"data.test={tmp_path}/apart.parquet")
    assert trained_on(config.game, config.data) == []
    config = config_of(*(f"{key}={tmp_path}/both.parquet" for key in ("data.test",)))
    assert trained_on(config.game, config.data) == []
    keys = ("data.validation", "data.test")
    config = config_of(train, *(f"{key}={tmp_path}/both.parquet" for key in keys))
    for key, warning in zip(keys, trained_on(config.game, config.data), strict=True):
        assert warning.startswith(f"2 of the 6 instances of {key} {tmp_path}/both.parquet are also")


def test_purposes_never_share_an_instance() -> None:
    config = config_of("game.options.size=4")
    drawn = {
        purpose: generated(purpose, game=config.game, seed=config.seed, start=0, num=50)
        for purpose in (TRAIN, VALIDATION, HELD_OUT, TEACHERS, TOKENIZER)
    }
    assert len({key for instances in drawn.values() for key in keys(instances)}) == 250
    assert len({content(i) for instances in drawn.values() for i in instances}) == 250


def test_held_out_instances_are_the_same_for_every_run_seed() -> None:
    for purpose, same in ((HELD_OUT, True), (VALIDATION, True), (TRAIN, False), (TEACHERS, False)):
        one, other = (
            generated(
                purpose,
                game=config_of(f"seed={seed}").game,
                seed=config_of(f"seed={seed}").seed,
                start=0,
                num=3,
            )
            for seed in (0, 1)
        )
        assert (one == other) == same, purpose


def test_options_that_hold_a_dict_choose_the_instances(tmp_path: Path) -> None:
    """Equal options give the same instances, others other ones."""
    text, own = (ROOT / "examples/split/split.py").read_text(), tmp_path / "boxes.py"
    lines = (
        ("import dataclass", "import dataclass, field"),
        ("    most:", "    box: dict[str, int] = field(default_factory=dict)\n    most:"),
        ("options.most", 'options.box["most"]'),
    )
    for line, other in lines:
        assert line in text
        text = text.replace(line, other)
    own.write_text(text)

    def held_out(most: int) -> tuple[Any, ...]:
        config = load_config(
            None, [*ROOM, f"game.name={own}", f"game.options.box={{most: {most}}}"]
        )
        return evaluation_instances(HELD_OUT, num=9, game=config.game, data=config.data)

    few, many = held_out(1), held_out(5)
    assert held_out(1) == few
    assert max(n for one in few for n in one.counts) == 1
    assert max(n for one in many for n in one.counts) > 1


def test_a_file_is_read_in_seeded_shuffled_epochs(tmp_path: Path) -> None:
    """17 instances, 5 per step: an epoch is 3 full steps and leaves out 2, others each time."""
    path = tmp_path / "games.parquet"
    write_instances(
        path, generated(TRAIN, game=config_of().game, seed=config_of().seed, start=100, num=17)
    )
    config = config_of(f"data.train={path}")
    stream = TrainStream(config)
    steps = [keys(stream.step(step, range(5))) for step in range(9)]
    epochs = [[*steps[first], *steps[first + 1], *steps[first + 2]] for first in (0, 3, 6)]
    assert all(len(set(epoch)) == 15 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(epoch) for epoch in epochs}) > 1, "the rest differs"
    assert keys(TrainStream(config).step(7, range(5))) == steps[7]
    other = TrainStream(config_of(f"data.train={path}", "seed=1"))
    assert keys(other.step(0, range(5))) != steps[0]


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "games.parquet"
    config = config_of(f"data.train={path}", f"data.test={path}")
    for num in (8, 6):
        write_instances(path, generated(TRAIN, game=config.game, seed=0, start=num, num=num))
        read = evaluation_instances(HELD_OUT, num=16, game=config.game, data=config.data)
        assert len(read) == num and set(keys(TrainStream(config).step(0, range(5)))) <= {
            *keys(read)
        }


def test_a_file_must_be_there_and_fill_a_step(tmp_path: Path) -> None:
    path = tmp_path / "games.parquet"
    with pytest.raises(ValueError, match=r"data\.train .*games\.parquet"):
        TrainStream(config_of(f"data.train={path}"))
    write_instances(
        path, generated(TRAIN, game=config_of().game, seed=config_of().seed, start=0, num=4)
    )
    with pytest.raises(ValueError, match=r"rollout\.instances .*\b4\b"):
        TrainStream(config_of(f"data.train={path}"))


def test_resampled_instances_occur_in_no_other_step() -> None:
    stream = TrainStream(config_of("methods.resample.instances=4"))
    all_keys = [key for step in range(5) for key in keys(stream.step(step, range(9)))]
    assert len(set(all_keys)) == 5 * 9
    assert keys(stream.step(3, range(5))) == keys(TrainStream(config_of()).step(3, range(5))), (
        "the batch itself is the same"
    )
    assert keys(stream.step(2, range(6, 8))) == keys(stream.step(2, range(9)))[6:8]


def test_a_file_gives_resampled_instances_from_the_rest_of_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "boards.parquet"
    write_instances(path, TrainStream(config_of()).step(0, range(8)))
    wanted = f"data.train={path}"
    stream = TrainStream(config_of(wanted, "rollout.instances=3", "methods.resample.instances=5"))
    for step in range(4):
        assert len(set(keys(stream.step(step, range(8))))) == 8
    with pytest.raises(SettingsError, match=r"resample\.instances, must be at most 5 .*got 6"):
        TrainStream(config_of(wanted, "rollout.instances=3", "methods.resample.instances=6"))
