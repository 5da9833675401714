"""Runs from Python: they are those of the command line, step by step, and leave nothing behind."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import yaml

import selfplay
from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.learner.method import Method
from selfplay.step import measure
from tests.helpers.interrupted import stopped
from tests.helpers.tiny_run import (
    TINY,
    assert_same_run,
    begin_warm,
    finished,
    metrics_of,
    same_weights,
)

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = yaml.safe_load(TINY)  # four steps, a checkpoint every two


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A new run folder with the warm start of the other runs."""
    begin_warm(tmp_path / "run")
    return tmp_path / "run"


def test_train_makes_the_run_of_the_command_line(warm: Path) -> None:
    of_the_command = finished()
    run = selfplay.train(SETTINGS, out=warm)
    assert_same_run(of_the_command, run.folder)
    assert not same_weights(run.policy, warm / "warm_start"), "nothing was learnt"
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert run.before and run.after and {"sampled", "greedy"} <= run.after.keys()
    assert run.games == selfplay.load_run(of_the_command).games
    assert run.policy == run.folder / "final" and run.config.steps == 4


def test_a_step_has_what_the_update_saw_of_each_token_of_the_logged_games(warm: Path) -> None:
    """The mean of their |mismatch| is the step's metric, as one mini-batch has all tokens; with
    four, those of the first have it alone."""
    with selfplay.start(SETTINGS, {"log_games_every": 1}, out=warm) as run:
        step = run.step()
        assert step.tokens.keys() == {sample.name for sample in step.samples}
        apart = []
        for sample in step.samples:
            record, trained = step.tokens[sample.name], list(map(bool, sample.mask))
            assert record.ids == list(compress(sample.ids, trained))
            assert record.logprobs == list(compress(sample.old_logprobs, trained))
            assert record.advantages == pytest.approx(list(compress(sample.advantages, trained)))
            assert len(record.mismatch) == len(record.ids)
            apart += map(abs, record.mismatch)
        mean = sum(apart) / len(apart)
        assert mean == pytest.approx(step.metrics["mismatch_mean"], rel=1e-3) and mean > 0
    begin_warm(warm.parent / "four")
    four = {"algorithm.minibatches": 4, "log_games_every": 1}
    with selfplay.start(SETTINGS, four, out=warm.parent / "four") as run:
        records = run.step().tokens.values()
        seen = [bool(record.mismatch) for record in records]
        assert all(record.advantages for record in records) and any(seen) and not all(seen)


class Halves(Method):
    """Halves the advantages, and leaves the first sample out."""

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[list[Sample], dict[str, float]]:
        return [replace(s, advantages=[a / 2 for a in s.advantages]) for s in samples[1:]], {}


def test_the_groups_have_the_advantages_that_methods_leave_to_the_update(warm: Path) -> None:
    """Half of what the credit gave, as each token of the update has; none where a method leaves a
    sample out."""
    with selfplay.start(SETTINGS, {"log_games_every": 1, "methods": {Halves: {}}}, out=warm) as run:
        step = run.step()
    _, *others = step.samples
    assert step.advantages.keys() == step.tokens.keys() == {sample.name for sample in others}
    for sample in others:
        half = sum(sample.advantages) / sum(sample.mask) / 2
        assert step.advantages[sample.name] == pytest.approx(half)
    games = [game for group in run.groups for game in group["games"]]
    told = [seat["advantage"] for game in games for seat in game["seats"] if "advantage" in seat]
    assert sorted(filter(None, told)) == sorted(filter(None, step.advantages.values()))


CELL = """
from selfplay.partners.opponents import Shares

class Mine(Shares):
    told = []
    def played(self, step, results):
        self.told.append((step, results["self"].games))

def instances(step, numbers, config):
    kit, options = config.game.kit, config.game.options
    return [one for n in numbers for one in kit.generate(options, seed=7, start=n, num=1)]
"""


def test_a_class_and_a_function_of_a_notebook_are_taken_as_they_are(
    warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell defines in `__main__`. A step has 16 games, those of the check before 8."""
    cell: Any = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    exec(CELL, cell.__dict__)
    own = {"rollout.opponents": cell.Mine, "data.train": cell.instances}
    with selfplay.start(SETTINGS, own, out=warm) as run:
        step = run.step()
        assert {game.instance for game in step.episodes} == {f"7/{n}" for n in range(4)}
        assert run.config.rollout.opponents == "__main__:Mine"
    assert cell.Mine.told[-1] == (0, 16)


def without_tokens(game: dict[str, Any]) -> dict[str, Any]:
    """The record of a game without its tokens' texts, which only a file has."""
    turns = [{k: v for k, v in turn.items() if k != "tokens"} for turn in game["turns"]]
    return {**game, "turns": turns}


def test_steps_by_hand_make_the_same_run_also_after_an_early_end(warm: Path) -> None:
    with selfplay.start(SETTINGS, out=warm) as run:
        first = run.step()
        assert run.num_done == first.number == 1 and run.folder == warm
        assert run.metrics == [json.loads(json.dumps(first.metrics))]
        assert len(first.episodes) == 16 and not (warm / "checkpoints").exists()
        groups = [
            {**each, "games": [without_tokens(game) for game in each["games"]]}
            for each in run.groups
        ]
        assert json.loads(json.dumps(first.groups)) == groups
        said = [repr(each) for each in (first, first.episodes[0], first.samples[0])]
        num_groups = len({each.group for each in first.samples})
        num = f"{len(first.samples)} samples in {num_groups} groups"
        assert said[0] == f"Step 1: 16 games, score {first.metrics['score']:.3f}, {num}"
        assert all(len(text) < 200 and "\n" not in text for text in [*said, repr(run.parts)])
        assert first.samples[0].name in said[2]
        assert selfplay.game_text(first.episodes[0]) == selfplay.game_text(
            {**first.groups[0]["games"][0], "step": 0}
        )
        run.finish()  # with three steps left
    assert selfplay.load_run(warm).after is not None
    with selfplay.start(SETTINGS, out=warm) as run:
        assert run.num_done == 1 and run.after is None
        while run.num_done < 4:
            run.step()
        run.finish()
    assert_same_run(finished(), warm)


def test_a_step_may_have_settings_of_its_own(warm: Path) -> None:
    """They end with it: the others are those of a run without. The line of the step has them."""
    plain = metrics_of(finished())
    with selfplay.start(SETTINGS, out=warm) as run:
        for key, said in {
            "rollout.group_size": "a step's overrides must be among .*, got rollout.group_size",
            "optim.rate": "nearest is optim.lr",
            "reward.options.cost": "reward.options must be settings of a custom reward.function",
            "algorithm.kl": "must be above 0 at the run's start to load a reference, got 0 there",
            "rollout.temperature": "rollout.temperature must be at most 100.* got 1000",
        }.items():
            with pytest.raises(selfplay.SettingsError, match=said):
                run.step({key: 1000.0})
        weights = dict(run.parts.learner.model.named_parameters())
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        first = run.step({"rollout.temperature": 1.0, "optim.lr": 0.0})
        assert all(torch.equal(weights[name], old) for name, old in before.items())
        second = run.step()
        assert not any(torch.equal(weights[name], old) for name, old in before.items())
        third = run.step({"rollout.temperature": 0.1, "algorithm.options": {"fair": {"by": 2}}})
    assert first.metrics["optim.lr"] == first.metrics["lr"] == 0.0
    assert first.metrics["rollout.temperature"] == 1.0
    assert first.metrics["score"] == plain[0]["score"]
    assert "optim.lr" not in second.metrics and second.metrics["lr"] == plain[1]["lr"] > 0
    assert third.metrics["entropy"] < second.metrics["entropy"] / 2
    assert run.metrics[2]["rollout.temperature"] == 0.1
    assert run.metrics[2]["algorithm.options.fair.by"] == 2.0
    assert third.metrics["mismatch_mean"] < 1e-5


def test_a_step_in_a_notebooks_cell_has_the_samples_that_it_trained_on(warm: Path) -> None:
    """A cell runs inside an event loop. The samples are seats of the step's games, and a group's
    advantages add up to zero: its mean is the baseline."""

    async def cell() -> Any:
        task = asyncio.current_task()
        with selfplay.start(SETTINGS, out=warm) as run:
            step = run.step()
        assert asyncio.current_task() is task
        return step

    step = asyncio.run(cell())
    assert len(selfplay.load_run(warm).metrics) == 1
    played = [t.ids for episode in step.episodes for t in episode.transcripts if t is not None]
    assert step.samples and all(sample.ids in played for sample in step.samples)
    for group in {sample.group for sample in step.samples}:
        samples = [sample for sample in step.samples if sample.group == group]
        advantages = [sample.advantages[sample.mask.index(1)] for sample in samples]
        assert sum(advantages) == pytest.approx(0, abs=1e-6) and any(advantages)


def test_a_closed_run_leaves_nothing_and_another_one_can_begin(warm: Path) -> None:
    others = set(psutil.Process().children(recursive=True))  # of other tests; may end meanwhile

    def state() -> tuple[object, ...]:
        children = set(psutil.Process().children(recursive=True)) - others
        return gc.get_threshold(), torch.get_num_threads(), signal.getsignal(15), children

    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)  # the run takes one
    before = state()
    for num in (1, 2):
        run = selfplay.start(SETTINGS, out=warm, save_every=1)
        assert state() != before
        run.step()
        model = weakref.ref(run.parts.learner.model)
        assert model() is not None
        run.close()
        gc.collect()
        assert model() is None, "the policy stays in memory"
        assert state() == before
        assert [line["step"] for line in run.metrics] == [*range(1, num + 1)]
    torch.set_num_threads(num_threads)


def test_an_interrupted_step_ends_the_run_and_its_restart_repeats_the_step(warm: Path) -> None:
    run = selfplay.start(SETTINGS, out=warm, save_every=1)
    run.step()
    with pytest.raises(KeyboardInterrupt), stopped(measure):
        run.step()
    for again in (run.step, run.finish):
        with pytest.raises(selfplay.SettingsError, match="ended by KeyboardInterrupt; close it"):
            again()
    with pytest.raises(selfplay.SettingsError, match="in use"):
        selfplay.start(SETTINGS, out=warm)
    run.close()
    with pytest.raises(selfplay.SettingsError, match="is closed"):
        run.step()
    with selfplay.start(SETTINGS, out=warm) as run:
        assert run.num_done == 1
        while run.num_done < 4:
            run.step()
        with pytest.raises(selfplay.SettingsError, match="steps must be above 4"):
            run.step()
    assert metrics_of(warm) == metrics_of(finished())


def test_importing_the_package_imports_no_library_and_every_name_is_there() -> None:
    code = """
import sys
import selfplay
print(sorted({"torch", "numpy", "pydantic", "yaml", "transformers", "asyncio"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert all(getattr(selfplay, name) for name in selfplay.__all__)
    assert dir(selfplay) == selfplay.__all__  # what a notebook offers
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = selfplay.trian
