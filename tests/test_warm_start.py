"""The warm start's batches: passes over the teachers' transcripts, and when there are too few."""

from __future__ import annotations

import pytest

from selfplay.chat import make_rendering
from selfplay.config import Config, load_config
from selfplay.samples import Sample
from selfplay.settings import SettingsError
from selfplay.warm_start import scratch_tokenizer, teacher_samples, warm_start_batches

BASE = (
    "model.scratch={tokenizer_games: 20}",
    "rollout.max_game_tokens=1024",
    "game={size: 2, scale: false, brief: true}",
    "warm_start={num_games: 4, keep: all, batch_size: 4, epochs: 2}",
)


def config_of(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Both seats' transcripts of four games."""
    config = config_of()
    rendering = make_rendering(scratch_tokenizer(config), template_kwargs={})
    return teacher_samples(config, rendering, start=0, num=config.warm_start.num_games)


def test_a_pass_holds_every_transcript_once_in_an_order_of_its_own(samples: list[Sample]) -> None:
    batches = warm_start_batches(samples, config_of())
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    first, second = (
        [sample.name for batch in batches[start : start + 2] for sample in batch]
        for start in (0, 2)
    )
    assert first != second and set(first) == set(second) == {sample.name for sample in samples}
    assert batches == warm_start_batches(samples, config_of())
    assert batches != warm_start_batches(samples, config_of("seed=1"))


def test_no_batch_is_short(samples: list[Sample]) -> None:
    for size, lengths in ((3, [3, 3]), (5, [5]), (8, [8])):
        config = config_of(f"warm_start.batch_size={size}", "warm_start.epochs=1")
        assert [len(batch) for batch in warm_start_batches(samples, config)] == lengths


def test_too_few_transcripts_for_a_batch_are_told(samples: list[Sample]) -> None:
    with pytest.raises(SettingsError, match="batch_size must be at most 8 transcripts, got 9"):
        warm_start_batches(samples, config_of("warm_start.batch_size=9"))
