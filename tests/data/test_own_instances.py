"""Training instances by a function of one's own: the example, a run, refusals."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from selfplay.data.stream import TrainStream
from selfplay.errors import OwnFault
from selfplay.preflight.functions import findings
from tests.helpers.small_games import config_of, refusal
from tests.helpers.tiny_run import assert_same_run, finished, go_on_from, metrics_of

METHOD = Path(__file__).resolve().parents[2] / "examples" / "method"
CURRICULUM = f"data.train={METHOD / 'curriculum.py'}:instances"
OWN = """
import random

def made(config, starts):
    kit, options = config.game.kit, config.game.options
    return [one for n in starts for one in kit.generate(options, seed=1, start=n, num=1)]

def fewer(step, numbers, config):
    return made(config, numbers)[1:]

def equal(step, numbers, config):
    return made(config, [0] * len(numbers))

def none(step, numbers, config):
    return [None for _ in numbers]

def draws(step, numbers, config):
    return made(config, [n + 100 * random.randrange(100) for n in numbers])

def by_place(step, numbers, config):
    return made(config, range(len(numbers)))

def fails(step, numbers, config):
    return made(config, numbers)[99]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("own") / "own_instances.py"
    file.write_text(OWN)
    yield file


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("fewer", "it must return a list of 16 instances, one per number, got 15"),
        ("equal", "unique keys, got .* twice"),
        ("none", "must be the game's, with a text `key`, got None"),
        ("draws", "must depend only on the step and their numbers"),
        ("by_place", "must depend only on the step and their numbers"),
        ("fails", "own_instances.py:[0-9]+ fails: IndexError"),
    ],
)
def test_instances_that_a_step_cannot_play_are_refused_in_one_line(
    own: Path, name: str, rule: str
) -> None:
    config = config_of(f"data.train={own}:{name}", "rollout.instances=16", "game.options.keep=all")
    assert re.search(rule, refusal("data.train", f"{own}:{name}", config))


def test_instances_of_one_step_are_checked_in_the_step_too(own: Path) -> None:
    with (
        closing(TrainStream(config_of(f"data.train={own}:fewer"))) as stream,
        pytest.raises(OwnFault, match=r"it must return a list of 4 instances, .* got 3"),
    ):
        stream.step(0, range(4))


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("data.options.easy=3", "unknown key data.options.easy; valid here are easy_steps"),
        ("data.options.easy_steps=x", "data.options.easy_steps must be a valid integer, got x"),
    ],
)
def test_an_option_that_the_function_does_not_have_is_refused(word: str, rule: str) -> None:
    config = config_of(CURRICULUM, word)
    with pytest.raises(ValueError, match=f"^{rule}"):
        list(findings("data.train", config.data.train, config))


def test_the_example_gives_easy_boards_first_in_process_and_by_workers() -> None:
    """With `keep: both` each seat's own plan is weak, in easy ones only by chance."""
    words = (CURRICULUM, "data.options.easy_steps=1", "game.options.keep=both")
    with (
        closing(TrainStream(config_of(*words))) as alone,
        closing(TrainStream(config_of(*words, "data.processes=2"))) as by_workers,
    ):
        steps = [alone.step(step, range(4)) for step in (0, 1)]
        assert steps == [by_workers.step(step, range(4)) for step in (0, 1)]
        assert alone.step(1, [2]) == steps[1][2:3]
    weak = [[max(board.solo) * 1.25 < board.best for board in boards] for boards in steps]
    assert not all(weak[0]) and all(weak[1])


def test_a_run_with_the_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    words = (CURRICULUM, "data.options.easy_steps=1", "steps=2", "save_every=1")
    run = finished(*words)
    assert metrics_of(run) != metrics_of(finished())[:2], "other boards"
    go_on_from(run, tmp_path / "run", *words)
    assert_same_run(run, tmp_path / "run")
