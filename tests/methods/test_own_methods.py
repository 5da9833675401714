"""Methods of one's own: the examples in a run that stops and goes on, a class given from Python,
the check, faults of a hook, and the settings of older runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import selfplay
from selfplay.advantages.sample import Sample
from selfplay.check import main
from selfplay.config import Config, load_config
from selfplay.config.load import load
from selfplay.config.plugins import function_of
from selfplay.config.text import dump
from selfplay.errors import OwnFault, SettingsError
from selfplay.learner.method import Method
from tests.helpers.small_updates import config_of, learner_with, some_samples
from tests.helpers.tiny_run import (
    assert_same_run,
    begin_warm,
    finished,
    go_on_from,
    metrics_of,
    tiny_model,
    write_tiny,
)
from tests.helpers.two_ranks import ALONE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "method" / "methods.py"
FORECAST, UNTIL, SHORT = (f"{EXAMPLES}:{name}" for name in ("Forecast", "UntilOneAgrees", "Short"))
OWN = (
    f"methods={{'{UNTIL}': {{more_instances: 2}}, '{SHORT}': {{most: 1000}}, '{FORECAST}': {{}}}}",
    # One move cannot end in an agreement.
    *("rollout.max_turns=1", "save_every=1", "algorithm.advantage=ema"),
)


def test_a_run_with_the_examples_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Nobody agrees in one move, so each step plays its two instances more."""
    once, again = finished(*OWN, "steps=2"), tmp_path / "again"
    for line in metrics_of(once):
        assert line["num_instances"] == 4 + 2 and "forecast_loss" in line
    go_on_from(once, again, *OWN, "steps=2")
    assert_same_run(once, again)
    assert (once / "code" / "methods.py").read_bytes() == EXAMPLES.read_bytes()


class Counted(Method):
    """Of a notebook: a number of its own in each line, which a checkpoint keeps."""

    num = 0

    def prepare(self, samples: Any, *, step: int, config: Config) -> Any:
        self.num += len(samples)
        return samples, {"num_counted": float(self.num)}


def test_python_gives_a_class_as_it_is(tmp_path: Path) -> None:
    begin_warm(tmp_path / "run")
    more: dict[str, Any] = {"methods": {Counted: {}}, "eval.final_games": 1}
    run = selfplay.train(write_tiny(tmp_path / "run"), more, out=tmp_path / "run", steps=1)
    assert run.metrics[0]["num_counted"] > 0
    (name,) = run.config.methods
    assert name.endswith("test_own_methods.py:Counted")  # in the run's copy of its file


def test_the_example_leaves_out_seats_of_many_tokens() -> None:
    """Of eight samples of 8, 12, … 36 tokens, those with at most 6 trained ones."""
    samples = some_samples(tiny_model())
    config = config_of(f"methods={{'{SHORT}': {{most: 6}}}}")
    (method,) = learner_with(config, tiny_model()).methods
    kept = method.samples(samples, [])
    assert 0 < len(kept) < len(samples) and {sum(s.mask) <= 6 for s in kept} == {True}


def test_the_check_names_the_hooks_and_a_slip_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([FORECAST, f"methods.{FORECAST}.lr=1.0e-3"]) == 0
    assert "ok  hooks: prepare, terms\n" in capsys.readouterr().out
    own = tmp_path / "own_slips.py"
    head = "from selfplay.learner.method import Method\nclass Mine(Method):\n    def "
    own.write_text(f"{head}after_plays(self): ...\n    def values(self): ...\n")
    assert main([f"{own}:Mine"]) == 0
    said = capsys.readouterr().out
    assert "after_plays is not a hook; nearest is after_play" in said and "values" not in said
    other = tmp_path / "own_other.py"
    other.write_text(f"{head}terms(self, terms): ...\n")
    assert main([f"{other}:Mine"]) == 2
    assert "terms must take (self, terms, minibatch, step), got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ("samples(self, samples, episodes): return samples[0].nothing", "no attribute 'nothing'"),
        (
            "after_play(self, rollout, more, *, config): return more(1)",
            "it may play 0 more instances",
        ),
        (
            "prepare(self, samples, *, step, config): return samples[0].mask.pop() and samples, {}",
            "a number of mask per token, got",
        ),
    ],
)
def test_a_hook_that_fails_ends_the_step_in_one_line(tmp_path: Path, hook: str, why: str) -> None:
    own = tmp_path / f"own_{hook[:5]}.py"
    text = "from selfplay.learner.method import Method\n\n\nclass Fails(Method):\n    def "
    own.write_text(f"{text}{hook}\n")
    begin_warm(tmp_path / "run")
    more = {"methods": {f"{own}:Fails": {}}, "eval.final_games": 1}
    run = selfplay.start(write_tiny(tmp_path / "run"), more, out=tmp_path / "run")
    with run, pytest.raises(OwnFault, match=why) as ended:
        run.step()
    assert f"methods {own}:Fails: " in str(ended.value) and "\n" not in str(ended.value)
    assert "the state after step 0 is saved" in str(ended.value)


def test_a_run_from_before_the_section_methods_is_read_as_it_was(tmp_path: Path) -> None:
    """A file of settings with an old key is refused, a run's own with all of them is read."""
    new = ["model.scratch={}", "rollout.max_game_tokens=1000", "algorithm.advantage=ppo"]
    new += ["methods.ppo.lam=0.5", "methods.recompute={importance: token, cap: 3.0}"]
    new += ["methods.best_games.weight=0.3", "methods.auxiliary_imitation={weight: 0.2, games: 3}"]
    config = load_config(None, new)
    old = yaml.safe_load(dump(config))
    del old["methods"]
    old["critic"] = {"lam": 0.5, "clip": 0.2, "lr": 1e-4, "warmup_steps": 0}
    old["algorithm"] |= {"old_logprobs": "recomputed", "importance": "token"}
    old["algorithm"] |= {"importance_cap": 3.0, "imitate_best": 0.3, "resample": 0}
    old["warm_start"] |= {"auxiliary_weight": 0.2, "auxiliary_games": 3}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    assert load(Config, tmp_path / "config.yaml").methods == config.methods
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(SettingsError, match=r"is methods\.\S+ now"):
        load(Config, tmp_path / "mine.yaml")
    old["algorithm"] |= {"advantage": "grpo", "old_logprobs": "engine", "importance": "none"}
    old["algorithm"] |= {"importance_cap": 2.0, "imitate_best": 0.0}
    old["warm_start"]["auxiliary_weight"] = 0.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    assert load(Config, tmp_path / "config.yaml").methods == {}


def test_equal_roles_have_equal_shares_of_the_loss() -> None:
    """Users with 6 and 2 tokens and an agent with 2: a token of a user weighs 10 / 2 / 8, one of
    the agent 10 / 2 / 2."""
    kind = function_of("methods", f"{EXAMPLES.with_name('equal_roles.py')}:EqualRoles")
    method = kind(None, SimpleNamespace(learner=SimpleNamespace(world=ALONE)))
    samples = [
        Sample(
            f"seat {seat}", [1] * num, [1] * num, [], [1.0] * num, seating=f"seat {seat} beside x"
        )
        for seat, num in enumerate((6, 2, 2))
    ]
    config = load_config("tiny_mediation")
    scaled, _ = method.prepare(samples, step=0, config=config)
    assert [sample.advantages[0] for sample in scaled] == [0.625, 0.625, 2.5]
