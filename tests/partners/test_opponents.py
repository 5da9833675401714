"""Opponents of one's own: draws, results, state, and a run with the example."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfplay.config.plugins import function_of
from selfplay.distributed import init_world
from selfplay.partners.opponents import Opponents, Result, Shares, pass_results
from selfplay.preflight.functions import findings
from tests.helpers.hand_episodes import episode, said
from tests.helpers.small_games import config_of, refusal
from tests.helpers.tiny_run import (
    assert_same_run,
    begin_warm,
    finished,
    go_on_from,
    metrics_of,
    run_tiny,
)

METHOD = Path(__file__).resolve().parents[2] / "examples" / "method"
PRIORITIZED = f"rollout.opponents={METHOD / 'prioritized.py'}:Prioritized"
POOL = "rollout.partners=[self,pool]"
OWN = """
import random
from selfplay.partners.opponents import Opponents, Shares

class Stranger(Opponents):
    def draw(self, step, members):
        return {"scripted:solo": 1.0}

class Negative(Opponents):
    def draw(self, step, members):
        return {"self": -1.0}

class Nobody(Opponents):
    def draw(self, step, members):
        return {"self": 0.0}

class Many(Opponents):
    def draw(self, step, members):
        return ["self", *members]

class Tosses(Opponents):
    def draw(self, step, members):
        return {"self": random.random(), members[0]: 1.0}

class Forgets(Opponents):
    games = 0
    def draw(self, step, members):
        return {"self": 1.0, members[0]: self.games}
    def played(self, step, results):
        self.games += sum(one.games for one in results.values())

class Keeps(Forgets):
    def state(self):
        return {"games": {self.games}}

class Every(Shares):
    def draw(self, step, members):
        return dict.fromkeys(members, 1.0)

class Lost(Opponents):
    games = 0
    def draw(self, step, members):
        return {"pool:7": 1.0} if self.games == 16 else {"self": 1.0}
    def played(self, step, results):
        self.games = results["self"].games

class Alone:
    def __init__(self, config):
        pass
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_opponents.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Stranger", "draw must name partners among self, pool:0, got 'scripted:solo'"),
        ("Negative", "a share of at least 0, got -1.0 for self"),
        ("Nobody", "a positive share, got {'self': 0.0}"),
        ("Many", r"a share for each partner, got \['self', 'pool:0'\]"),
        ("Tosses", "draw must be deterministic"),
        ("Forgets", "state must hold all that draw depends on"),
        ("Keeps", "Object of type set is not JSON serializable"),
        ("Alone", "it must be a subclass of selfplay.partners.opponents.Opponents"),
    ],
)
def test_opponents_that_cannot_be_drawn_or_resumed_are_refused_in_one_line(
    own: Path, name: str, rule: str
) -> None:
    config = config_of(POOL, f"rollout.opponents={own}:{name}")
    assert re.search(rule, refusal("rollout.opponents", f"{own}:{name}", config))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ((POOL, "rollout.options.alon=2"), "^unknown key rollout.options.alon; nearest is .*alone"),
        ((POOL, "rollout.options.alone=x"), "^rollout.options.alone must be .* integer, got x"),
        (("rollout.partners=[self]",), "Prioritized: .*rollout.partners must have pool"),
    ],
)
def test_settings_of_the_example_that_it_does_not_take(words: tuple[str, ...], rule: str) -> None:
    config = config_of(PRIORITIZED, *words)
    with pytest.raises(ValueError, match=rule):
        list(findings("rollout.opponents", config.rollout.opponents, config))


def test_the_pool_member_of_the_built_in_is_drawn_uniformly_by_step() -> None:
    opponents = Shares(config_of("rollout.partners=[self*0.25,pool*0.75]"))
    members = [f"pool:{member}" for member in range(4)]
    drawn = [opponents.draw(step, members) for step in range(400)]
    assert drawn == [opponents.draw(step, members) for step in range(400)]
    num = dict.fromkeys(members, 0)
    for draw in drawn:
        (_, own), (member, share) = draw.items()
        assert (own, share) == (0.25, 0.75)
        num[member] += 1
    assert all(70 < times < 130 for times in num.values())  # 3.5 standard deviations of 100


def test_results_have_the_scores_of_both_sides() -> None:
    """Two games with each: the policy in seat 0 gets 0.2 and 0.4, in self-play both get 0.5."""
    told: dict[str, Result] = {}

    class Told(Opponents):
        def played(self, step: int, results: Mapping[str, Result]) -> None:
            told.update(results)

    games = [episode((0.5, 0.5))]
    for both in ((0.2, 0.9), (0.4, 0.7)):
        game = episode(both, transcripts=(said(1), None))
        outcome = replace(game.outcome, seat_scores=both)
        games.append(replace(game, partner="pool:3", outcome=outcome))
    pass_results(Told(config_of()), 0, games, init_world(device="cpu"))
    assert told == {"pool:3": Result(2, pytest.approx(0.3), 0.8), "self": Result(1, 0.5, 0.5)}


def test_the_example_draws_the_member_that_the_policy_does_worst_with() -> None:
    """Scores 0.9 and 0 give weights 0.011 and 1.001."""
    kind = function_of("rollout.opponents", PRIORITIZED.partition("=")[2])
    one: Any = kind(config_of(PRIORITIZED, POOL, "rollout.options.alone=2"))
    members = ["pool:0", "pool:20"]
    assert [one.draw(step, members) for step in (0, 1)] == [{"self": 1.0}] * 2
    one.played(2, {"pool:0": Result(8, 0.9, 0.1), "pool:20": Result(8, 0.0, 1.0)})
    drawn = [dict(one.draw(step, members)) for step in range(2, 102)]
    assert sum("pool:20" in draw for draw in drawn) > 90
    assert all(draw["self"] == 0.5 and len(draw) == 2 for draw in drawn)


def test_a_run_with_the_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Self-play in the first step, then half of it with a member of the pool."""
    words = (PRIORITIZED, POOL, "rollout.options.alone=1", "policy_pool.every=1")
    words += ("steps=3", "save_every=1")
    run = finished(*words)
    first, *others = metrics_of(run)
    assert not [name for name in first if name.startswith("score/")]
    for line in others:
        assert len([name for name in line if name.startswith("score/pool:")]) == 2
        assert "score/self" in line
    go_on_from(run, tmp_path / "run", *words)
    assert_same_run(run, tmp_path / "run")


def test_several_members_play_in_one_step(own: Path) -> None:
    words = (f"rollout.opponents={own}:Every", POOL, "policy_pool.every=1", "steps=3")
    lines = metrics_of(finished(*words))
    for step, line in enumerate(lines):
        members = {f"score/pool:{n}/{seat}" for n in range(step + 1) for seat in (0, 1)}
        assert {name for name in line if name.startswith("score/")} == members


def test_a_draw_that_fails_in_a_step_saves_the_step_before(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step has 16 games, one of the check before the start 8."""
    words = (f"rollout.opponents={own}:Lost", POOL, "save_every=9")
    begin_warm(tmp_path / "run", *words)
    assert run_tiny(tmp_path / "run", *words) == 1
    said = capsys.readouterr().err
    assert "draw must name partners among self, pool:0, got 'pool:7'" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
