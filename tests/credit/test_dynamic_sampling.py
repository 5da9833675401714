"""Dynamic sampling: how many rounds, which places, the same on all ranks; and a step in which all
groups have zero variance."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from selfplay.config import AlgorithmConfig, Config, RewardConfig, load_config
from selfplay.credit.advantages import assign_advantages, reward_samples
from selfplay.credit.dynamic_sampling import Played, play_full
from selfplay.distributed import init_world
from selfplay.rollout.driver import RolloutStats
from selfplay.rollout.episode import Episode
from tests.credit.test_advantages import episode, said
from tests.helpers.processes import two_ranks
from tests.helpers.tiny_run import RUNS, finished, metrics_of, run_warm, same_weights

METHODS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ema")


def has_variance(place: int) -> bool:
    """Of the first four places rank 0 plays the even ones, all without variance; rank 1 plays the
    odd ones, all with variance."""
    return place in (1, 3) or place >= 5


def config_of(resample: int, *more: str) -> Config:
    words = ["model.scratch={}", "rollout.max_game_tokens=1000", "rollout.instances=4"]
    return load_config(
        None, [*words, "rollout.group_size=2", f"algorithm.resample={resample}", *more]
    )


def place_games(
    has_variance: Callable[[int], bool], rounds: list[list[int]], places: Sequence[int]
) -> Played:
    """Two games at each place. Their rewards differ at places with variance, less at later ones."""
    rounds.append(list(places))
    games: list[Episode] = []
    for place in places:
        for index in (0, 1):
            reward = index / (1 + place) if has_variance(place) else 1.0
            seats = (said(10, num=1 + place), said(20))
            name = f"board {place}"
            games.append(episode((reward, reward), index, instance=name, transcripts=seats))
    return games, RolloutStats(10 * len(games), len(games), 0.5)


def play_rounds(
    has_variance: Callable[[int], bool], *, resample: int
) -> tuple[list[list[int]], Played]:
    """The places of each round, and what was played."""
    rounds: list[list[int]] = []
    played = play_full(
        partial(place_games, has_variance, rounds),
        num_instances=config_of(resample).rollout.instances,
        algorithm=config_of(resample).algorithm,
        reward=config_of(resample).reward,
        world=init_world(device="cpu"),
    )
    return rounds, played


def test_without_a_budget_a_batch_is_played_once() -> None:
    rounds, (games, _) = play_rounds(lambda place: False, resample=0)
    assert rounds == [[0, 1, 2, 3]] and len(games) == 8


def test_missing_instances_are_replaced_until_the_batch_is_full() -> None:
    """Places 1 and 4 and all from 6 on have variance: three are missing, then one."""
    rounds, (games, stats) = play_rounds(lambda place: place in (1, 4) or place >= 6, resample=20)
    assert rounds == [[0, 1, 2, 3], [4, 5, 6], [7]]
    assert [len(games), stats.num_generated_tokens, stats.engine_s] == [16, 16, 1.5]
    assert [game.instance for game in games[::2]] == [f"board {place}" for place in range(8)]


def test_the_budget_limits_the_added_places() -> None:
    rounds, _ = play_rounds(lambda place: False, resample=6)
    assert rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_full_batch_needs_one_round() -> None:
    assert play_rounds(lambda place: True, resample=6)[0] == [[0, 1, 2, 3]]


def test_two_ranks_play_the_rounds_of_one_and_give_its_advantages() -> None:
    """Rank 0 has no variance in its half of the first round; both ranks play all rounds."""
    ranks = two_ranks("filled up")
    rounds, (games, _) = play_rounds(has_variance, resample=20)
    assert rounds == [[0, 1, 2, 3], [4, 5], [6]]
    assert [rank["asked"] for rank in ranks] == [[[0, 2], [4], [6]], [[1, 3], [5], []]]
    for method in METHODS:
        algorithm = AlgorithmConfig(method=method)
        samples, _ = reward_samples(games, algorithm=algorithm, reward=RewardConfig())
        alone = assign_advantages(samples, algorithm=algorithm, baselines={"seat 0": 0.25})
        first, second = (rank[method] for rank in ranks)
        assert first["baselines"] == second["baselines"]
        assert not first["advantages"].keys() & second["advantages"].keys()
        expected = {sample.name: sample.advantages[-1] for sample in alone}
        assert first["advantages"] | second["advantages"] == pytest.approx(expected)


NO_REWARD = ("rollout.max_turns=1", "steps=2")  # one move cannot end in an agreement


@pytest.mark.parametrize("old", ["engine", "recomputed"])
def test_a_step_of_zero_variance_groups_is_logged_and_changes_no_weight(
    tmp_path: Path, old: str
) -> None:
    folder = tmp_path / "run"
    settings = ("algorithm.resample=2", f"algorithm.old_logprobs={old}")
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


def test_a_checkpoint_holds_baselines_and_instances_for_prioritized_replay() -> None:
    run = finished(*RUNS["baselines and drawn instances"])
    progress = json.loads((run / "checkpoints" / "step_000002" / "progress.json").read_text())
    state = progress["state"]
    assert set(state["baselines"]) == {"seat 0", "seat 1"} and state["prioritized_replay"]
