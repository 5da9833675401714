"""What a step trains on and what a game pays its seats, by hand; the step's line says it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from selfplay.advantages.advantages import reward_samples
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.metrics.step import add_up, game_sums, reward_metrics, reward_tally
from selfplay.rollout.episode import Episode
from tests.helpers.hand_episodes import episode, said

# Seat 1 pays 0.25 for its refused move. The second game has no agreement, and both its groups have
# zero variance: in the first, seat 0 has 1 and 1.
GAMES = [episode((1.0, -0.5), errors=(0, 1)), episode((1.0, 0.5), index=1, agreed=False)]


def rewards_of(*ranks: Sequence[Episode]) -> dict[str, float]:
    """The metrics of games that lie on several ranks."""
    penalty = RewardConfig(error_penalty=0.25)
    sums = []
    for games in ranks:
        _, stats = reward_samples(games, algorithm=AlgorithmConfig(), reward=penalty)
        sums.append(reward_tally(games, stats))
    return reward_metrics(add_up(sums))


def test_the_reward_is_that_of_the_samples_those_of_dropped_groups_included() -> None:
    """Rewards 1 and 1 of seat 0, whose group is dropped, and -0.75 and 0.5 of seat 1."""
    metrics = rewards_of(GAMES)
    assert list(metrics) == ["reward", "reward_std", "reward/0", "reward/1"]
    assert (metrics["reward/0"], metrics["reward/1"]) == (1.0, -0.125)
    assert metrics["reward"] == (1 + 1 - 0.75 + 0.5) / 4
    squares = (1 + 1 + 0.75**2 + 0.5**2) / 4
    assert metrics["reward_std"] == pytest.approx((squares - metrics["reward"] ** 2) ** 0.5)
    assert rewards_of(GAMES[:1], [], GAMES[1:]) == pytest.approx(metrics)
    assert rewards_of([]) == {}


def test_a_partners_seat_has_no_reward() -> None:
    game = replace(GAMES[0], transcripts=(None, said(7)), players=("scripted:fair", "policy"))
    assert rewards_of([game]) == {"reward": -0.75, "reward_std": 0.0}


def test_a_game_pays_seats_for_moves_and_at_the_end() -> None:
    """Only where it pays them differently; a refused move costs nothing here."""
    paid = replace(GAMES[0].turns[0], rewards=(0.0, 0.25), error=None)
    measures = game_sums([replace(GAMES[0], turns=(paid,))], paid=True).means()
    assert (measures["reward/0"], measures["reward/1"]) == (1.0, -0.25)
    same = [episode((0.5, 0.5)), episode((0.25, 0.25))]
    assert "reward/0" not in game_sums(same, paid=True).means()
    # Two games that pay the seats the same on average, but not in each.
    draw = [episode((1.0, -1.0)), episode((-1.0, 1.0))]
    measures = game_sums(draw, paid=True).means()
    assert (measures["reward/0"], measures["reward/1"]) == (0.0, 0.0)


def test_completion_stands_apart_from_the_score_given_completion() -> None:
    games = [episode((0.8, 0.8)), episode((0.4, 0.4)), episode((0.0, 0.0), agreed=False)]
    measures = game_sums(games).means()
    assert measures["agreement"] == pytest.approx(2 / 3)
    assert measures["score"] == pytest.approx(0.4)
    assert measures["score_if_agreed"] == pytest.approx(0.6)
    assert "score_if_agreed" not in game_sums(games[2:]).means()
