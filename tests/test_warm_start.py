"""The warm start's stages: which boards come when, and that bad entries are told at once."""

from __future__ import annotations

import pytest

from selfplay.chat import make_rendering
from selfplay.config import Config, load_config
from selfplay.settings import SettingsError
from selfplay.warm_start import board_stages, scratch_tokenizer, teacher_samples, warm_start_batches

BASE = (
    "model.scratch={tokenizer_games: 20}",
    "rollout.max_game_tokens=1024",
    "game={size: 4, scale: false, brief: true}",
    "warm_start={num_games: 8, keep: all, batch_size: 4}",
)


def config_of(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


def sizes_and_games(config: Config) -> list[tuple[int, int]]:
    return [(at.game.size, num) for at, num in board_stages(config)]


def test_the_games_are_dealt_to_the_stages_by_their_shares() -> None:
    assert sizes_and_games(config_of()) == [(4, 8)]
    assert sizes_and_games(config_of("warm_start.boards=[2*0.25, 4*0.75]")) == [(2, 2), (4, 6)]
    assert sizes_and_games(config_of("warm_start.boards=['2', '3', '4']")) == [
        (2, 3),
        (3, 2),
        (4, 3),
    ]


def test_small_boards_are_imitated_first() -> None:
    config = config_of("warm_start.boards=[2*0.5, 4*0.5]", "warm_start.epochs=2")
    rendering = make_rendering(scratch_tokenizer(config), template_kwargs={})
    stages = [teacher_samples(at, rendering, start=0, num=num) for at, num in board_stages(config)]
    batches = warm_start_batches(stages, config)
    assert [len(batch) for batch in batches] == [4] * 8  # 2 stages, 2 passes over 8 transcripts
    lengths = [max(len(sample.ids) for sample in batch) for batch in batches]
    assert max(lengths[:4]) < min(lengths[4:])
    first = [{sample.name for batch in batches[i : i + 2] for sample in batch} for i in (0, 2)]
    assert first[0] == first[1]  # a pass holds every transcript once


@pytest.mark.parametrize(
    ("boards", "message"),
    [
        ("[large]", "takes 'size\\*share', as in '3\\*0.2', got 'large'"),
        ("[8*1]", "a size must be from 2 to game.size \\(4\\).*got '8\\*1'"),
        ("[3*0]", "a share above 0, got '3\\*0'"),
    ],
)
def test_bad_stages_are_told(boards: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        board_stages(config_of(f"warm_start.boards={boards}"))
