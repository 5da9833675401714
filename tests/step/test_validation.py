"""Validation games are played after each `eval.every` steps, never with 0."""

from selfplay.step import evaluates_after
from tests.helpers.small_updates import config_of


def test_validation_comes_after_every_so_many_steps() -> None:
    played = {
        n: [evaluates_after(config_of(f"eval.every={n}"), done) for done in range(1, 7)]
        for n in (0, 2, 3)
    }
    assert played[0] == [False] * 6
    assert played[2] == [False, True] * 3
    assert played[3] == [False, False, True] * 2
