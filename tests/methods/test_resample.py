"""Dynamic sampling: how many rounds, which instances, the same on all ranks; and a
step in which all groups have zero variance."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from selfplay.advantages.advantages import reward_samples
from selfplay.config import AlgorithmConfig, RewardConfig, load_config
from selfplay.distributed import init_world
from selfplay.partners.opponents import Shares
from selfplay.rollout.driver import Rollout
from selfplay.step.run import Policy
from tests.helpers.hand_episodes import with_advantages
from tests.helpers.processes import two_ranks
from tests.helpers.resampling import (
    METHODS,
    HasVariance,
    has_variance,
    play_rounds,
)
from tests.helpers.shared_work import slow_except
from tests.helpers.tiny_run import metrics_of, run_warm, same_weights


def play_alone(
    has_variance: HasVariance, *, resample: int, **more: Any
) -> tuple[list[list[int]], Rollout]:
    return play_rounds(has_variance, resample=resample, world=init_world(device="cpu"), **more)


def test_without_a_budget_a_batch_is_played_once() -> None:
    rounds, rollout = play_alone(lambda number: False, resample=0)
    assert rounds == [[0, 1, 2, 3]] and len(rollout.episodes) == 8


def test_missing_instances_are_replaced_until_the_batch_is_full() -> None:
    """Instances 1 and 4 and all from 6 on have variance: three are missing, then one."""
    rounds, rollout = play_alone(lambda number: number in (1, 4) or number >= 6, resample=20)
    games, stats = rollout.episodes, rollout.stats
    assert rounds == [[0, 1, 2, 3], [4, 5, 6], [7]]
    assert [len(games), stats.num_generated_tokens, stats.engine_s] == [16, 16, 1.5]
    assert [game.instance for game in games[::2]] == [f"board {number}" for number in range(8)]


def test_part_of_an_instance_is_replaced_by_a_whole_one() -> None:
    """Of 8 groups 5 have variance: those of instances 0 and 1, and of 2 that of seat 0. Three are
    missing, of two an instance."""
    assert play_alone(lambda number: number != 3, resample=20, alone=[2])[0] == [
        [0, 1, 2, 3],
        [4, 5],
    ]


def test_the_budget_limits_the_added_instances() -> None:
    rounds, _ = play_alone(lambda number: False, resample=6)
    assert rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_only_groups_of_policies_that_train_count() -> None:
    """Both seats' groups of instances 0 and 1 have variance, of 2 and 3 those of the user alone.
    The agent, who trains, is missing two instances; both together are missing one."""
    cast = ("user", "agent")

    def play(*trained: str) -> list[list[int]]:
        return play_alone(lambda n: True, resample=20, alone=[2, 3], cast=cast, trained=trained)[0]

    assert play("agent") == [[0, 1, 2, 3], [4, 5]]
    assert play("user") == [[0, 1, 2, 3]]
    assert play(*cast) == [[0, 1, 2, 3], [4]]


def test_a_full_batch_needs_one_round() -> None:
    assert play_alone(lambda number: True, resample=6)[0] == [[0, 1, 2, 3]]


def test_two_ranks_play_the_rounds_of_one_and_give_its_advantages() -> None:
    """Rank 0 has no variance in its half of the first round; both ranks play all rounds."""
    ranks = two_ranks("filled up")
    rounds, rollout = play_alone(has_variance, resample=20)
    assert rounds == [[0, 1, 2, 3], [4, 5], [6]]
    assert [rank["asked"] for rank in ranks] == [[[0, 2], [4], [6]], [[1, 3], [5], []]]
    for method in METHODS:
        algorithm = AlgorithmConfig(advantage=method)
        samples, _ = reward_samples(rollout.episodes, algorithm=algorithm, reward=RewardConfig())
        alone = with_advantages(samples, algorithm=algorithm, baselines={"seat 0": 0.25})
        first, second = (rank[method] for rank in ranks)
        assert first["baselines"] == second["baselines"]
        assert not first["advantages"].keys() & second["advantages"].keys()
        expected = {sample.name: sample.advantages[-1] for sample in alone}
        assert first["advantages"] | second["advantages"] == pytest.approx(expected)


NO_REWARD = ("rollout.max_turns=1", "steps=2")  # one move cannot end in an agreement


@pytest.mark.parametrize("old", slow_except(("off", "on"), "off"))
def test_a_step_of_zero_variance_groups_is_logged_and_changes_no_weight(
    tmp_path: Path, old: str
) -> None:
    folder = tmp_path / "run"
    settings = ("methods.resample.instances=2", f"methods.recompute={old}")
    run_warm(folder, *NO_REWARD, *settings)
    for line in metrics_of(folder):
        assert (line["zero_variance_groups"], line["num_trained_tokens"], line["score"]) == (
            1.0,
            0.0,
            0.0,
        )
        assert line["num_instances"] == 4 + 2 and line["num_games"] == 4 * 6
        assert "non_finite" not in line and "policy_loss" not in line
    assert same_weights(folder / "warm_start", folder / "final")


def test_the_state_of_a_run_has_its_moving_averages() -> None:
    """What `ema` resumes with (tests/run/test_resume.py has the whole way)."""
    learner = SimpleNamespace(methods=[], reference_digest="")
    stateless = SimpleNamespace(state=dict)
    policy: Any = SimpleNamespace(
        baselines={"seat 0": 0.5},
        learner=learner,
        sync_check=stateless,
        partners=stateless,
        opponents=Shares(load_config("tiny")),
    )
    assert Policy.state(policy)["baselines"] == {"seat 0": 0.5}
