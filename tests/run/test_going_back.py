"""A monitor sends a run back to its best checkpoint: all that learns returns, steps go on.

The number that the rule reads is an observer's, by hand: .5, .9, .8, .6, .1, .9. After the fifth
step the run goes back to the second, the best of those saved.
"""

import io
import json
import os
import shutil
import signal
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import selfplay
from selfplay.checkpoint import OpenCheckpoint, checkpoints, learner_state
from selfplay.config import load_config
from selfplay.errors import SettingsError
from selfplay.preflight.run import check_going_back, is_zero_sum
from selfplay.step.ending import save_learner
from selfplay.step.run import Policy
from selfplay.weight_sync.supervised import SupervisedPolicy
from tests.helpers.casts import TRAINED
from tests.helpers.given_numbers import VALUES
from tests.helpers.interrupted import stopped
from tests.helpers.shared_work import once, slow_except
from tests.helpers.tiny_run import (
    assert_same_run,
    begin_warm,
    metrics_of,
    run_tiny,
    write_tiny,
)

ROOT = Path(__file__).resolve().parents[2]
BACK = "back to best if observed/x < 0.3"


OBSERVED = ("observers=[console, tests.helpers.given_numbers:Given, league]", f"monitors=[{BACK}]")
# Everything that learns or counts results: baselines, a moving reference, games to imitate, a pool,
# a league.
RUN = (
    *("steps=6", "save_every=2", "keep_checkpoints=1", "optim.schedule=constant"),
    *OBSERVED,
    *("algorithm.advantage=ema", "algorithm.kl=0.2"),
    "methods={best_games: {weight: 0.5}, kl_reference: {every: 2}}",
    *("rollout.partners=[self,pool*2]", "policy_pool.every=1", "rollout.instances=6"),
    "rollout.opponents=league",
)


def returns(policy: Policy) -> dict[str, Any]:
    """What goes back, copied: tensors, and the policy's plain values in a checkpoint."""
    plain = policy.state()
    del plain["sync_check"]
    return deepcopy({"tensors": learner_state(policy.learner), "plain": plain})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def went_back() -> Path:
    """The finished run, with its folder after four steps, what its policy had and which checkpoints
    there were after each step, and what it said. Only to read."""

    def make(home: Path) -> None:
        begin_warm(home / "run", *RUN)
        states, kept, said = [], [], io.StringIO()
        config = load_config(write_tiny(home / "run"), [f"out={home / 'run'}", *RUN])
        with redirect_stderr(said), selfplay.start(config) as run:
            for number, _ in enumerate(VALUES, start=1):
                run.step()
                states.append(returns(run.parts.policies[0]))
                kept.append([int(each.name[5:]) for each in checkpoints(home / "run")])
                if number == 4:
                    shutil.copytree(home / "run", home / "four steps" / "run")
            run.finish()
        torch.save(states, home / "states")
        (home / "kept").write_text(json.dumps(kept))
        (home / "said").write_text(said.getvalue())

    return once(("went back", RUN), make)


def test_all_that_learns_returns_and_steps_and_draws_go_on() -> None:
    home = went_back()
    states = torch.load(home / "states", weights_only=False)
    second, fifth = states[1], states[4]
    assert equal(second, fifth)
    assert second["plain"]["partners"] == {"pool": [0, 1, 2]}
    for name in ("baselines", "methods", "opponents"):
        assert second["plain"][name] != states[3]["plain"][name], (
            "a state that stays proves nothing"
        )
    for name in ("model", "optimizer", "kept"):
        assert not equal(second["tensors"][name], states[3]["tensors"][name])
    assert states[5]["plain"]["partners"] == {"pool": [0, 1, 2, 6]}
    lines = metrics_of(home / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.get("back_to") for line in lines] == [None, None, None, None, 2, None]
    (said,) = [line for line in (home / "said").read_text().splitlines() if "goes back" in line]
    assert said == (
        f"warning: monitor '{BACK}', step 5: the mean of observed/x is 0.1; the policy goes back "
        "to step 2"
    )
    games = [json.loads(line) for line in (home / "run" / "games.jsonl").open()]
    played = {step: {game["instance"] for game in games if game["step"] == step} for step in (3, 6)}
    assert not played[3] & played[6]


def test_each_policy_of_a_cast_returns(tmp_path: Path) -> None:
    """One with a pool, one without; both have a baseline and a rate of their own."""
    words = (*TRAINED, *OBSERVED, "steps=5", "save_every=2")
    begin_warm(tmp_path / "run")
    given = dict(word.split("=", 1) for word in words)
    config = load_config(
        write_tiny(tmp_path / "run"), [f"{name}={value}" for name, value in given.items()]
    )
    with selfplay.start(replace(config, out=str(tmp_path / "run"))) as run:
        states = []
        for _ in range(5):
            run.step()
            states.append([returns(policy) for policy in run.parts.policies])
    for before, worse, after in zip(states[1], states[3], states[4], strict=True):
        assert equal(before, after) and not equal(before["tensors"], worse["tensors"])
        assert before["plain"]["baselines"] != worse["plain"]["baselines"]
    assert [one["plain"]["partners"]["pool"] for one in states[4]] == [[], [0, 1, 2]]


def test_the_best_checkpoint_is_kept_as_long_as_it_is_the_best() -> None:
    """Of at most one: those of steps 4 and 2, then of 5 and 2, then of 6, which is as good."""
    kept = json.loads((went_back() / "kept").read_text())
    assert kept == [[], [2], [2], [2, 4], [2, 5], [6]]


# From the fourth step on: pushes are those of the start, of the fifth step, back, of the sixth.
KILLED = {
    "in the save": lambda: stopped(save_learner, 1, signal.SIGKILL),
    "before the save has its name": lambda: stopped(OpenCheckpoint.finish, 1, signal.SIGKILL),
    "in the push": lambda: stopped(SupervisedPolicy.push, 3, signal.SIGKILL),
    "after it": lambda: stopped(SupervisedPolicy.push, 4, signal.SIGKILL),
}


@pytest.mark.parametrize("where", slow_except(KILLED, "in the save", "after it"))
def test_a_run_killed_in_the_going_back_goes_on_bit_for_bit(where: str, tmp_path: Path) -> None:
    straight, run = went_back() / "run", tmp_path / "run"
    shutil.copytree(went_back() / "four steps" / "run", run)
    child = os.fork()
    if child == 0:
        try:
            with KILLED[where]():
                run_tiny(run, *RUN)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    newest = 5 if where == "after it" else 4
    assert checkpoints(run)[-1].name == f"step_00000{newest}"
    assert run_tiny(run, *RUN) == 0
    assert_same_run(straight, run)


def test_a_damaged_best_checkpoint_ends_the_run_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(went_back() / "four steps" / "run", tmp_path / "run")
    with selfplay.start(load_config(write_tiny(run), [f"out={run}", *RUN])) as opened:
        shutil.rmtree(run / "checkpoints" / "step_000002")
        with pytest.raises(selfplay.RunEnds, match=r"step_000002 must be undamaged.*with step 6"):
            opened.step()
    assert checkpoints(run)[-1].name == "step_000005"


@pytest.mark.parametrize("metric", ["score", "score/self", "eval_score", "score*"])
def test_in_a_zero_sum_game_best_is_not_by_the_score_with_itself(metric: str) -> None:
    """Of Kuhn poker, where it is 0.5; of matching, where both seats share it, best may be."""
    kuhn, rule = ROOT / "examples/kuhn/kuhn.py", f"back to best if {metric} falls 0.1"
    game = [f"game.name={kuhn}", f"monitors=[{rule}]"]
    config = load_config(ROOT / "examples/kuhn/kuhn.yaml", game)
    assert is_zero_sum(config)
    with pytest.raises(SettingsError, match=r"observed/exploitability.*got 'back to best") as said:
        check_going_back(config)
    assert "\n" not in str(said.value)
    check_going_back(load_config(ROOT / "configs/tiny.yaml", [f"monitors=[{rule}]"]))
    for other in ("observed/exploitability rises 0.1", "eval_score/scripted:honest falls 0.1"):
        words = [game[0], f"monitors=[back to best if {other}]"]
        check_going_back(load_config(ROOT / "examples/kuhn/kuhn.yaml", words))
