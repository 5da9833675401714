"""The groups of a step: by hand, and those that a run keeps."""

import json
from dataclasses import replace

import pytest

from selfplay.advantages.advantages import reward_samples
from selfplay.config import AlgorithmConfig, RewardConfig
from selfplay.metrics.records import group_records, mean_advantages
from tests.helpers.hand_episodes import episode, said, with_advantages
from tests.helpers.tiny_run import finished, metrics_of

PAID = ((0.0, 0.5), (0.0, 0.0))  # what two moves of seat 1 are paid


def test_games_of_an_instance_stand_side_by_side_with_what_they_were_worth() -> None:
    """Seat 0 has rewards 1 and 0, seat 1 twice 0.5: its group trains nothing."""
    games = [episode((1.0, 0.5)), episode((0.0, 0.5), index=1), episode((1.0, 1.0), instance="b")]
    algorithm = AlgorithmConfig(advantage="dr_grpo")
    samples, stats = reward_samples(games, algorithm=algorithm, reward=RewardConfig())
    advantages = mean_advantages(with_advantages(samples, algorithm=algorithm))
    first, second = group_records(games, stats, advantages, step=7)
    assert (first["step"], first["instance"], second["instance"]) == (7, "hand/0", "b")
    assert [game["episode"] for game in first["games"]] == [0, 1]
    credit = [
        [[seat[name] for name in ("reward", "return", "advantage")] for seat in game["seats"]]
        for game in first["games"]
    ]
    assert credit == [[[1.0, 1.0, 0.5], [0.5, 0.5, None]], [[0.0, 0.0, -0.5], [0.5, 0.5, None]]]
    assert second["games"][0]["seats"][0]["advantage"] is None
    json.dumps([first, second])


def test_a_return_counts_what_is_still_to_come_and_a_partner_has_none() -> None:
    """Seat 1 is paid 0.5 for the move of its first token and 1 at the end: returns 1.5 and 1."""
    game = episode((0.0, 1.0), transcripts=(None, said(7)))
    transcript = game.transcripts[1]
    assert transcript is not None
    transcript.act([8], logprobs=[-0.5])
    moves = [replace(episode((0, 0), errors=(0, 1)).turns[0], error=None, rewards=r) for r in PAID]
    game = replace(game, turns=tuple(moves))
    _, stats = reward_samples([game], algorithm=AlgorithmConfig(), reward=RewardConfig())
    (group,) = group_records([game], stats, {}, step=1)
    partner, policy = group["games"][0]["seats"]
    assert "reward" not in partner
    assert (policy["reward"], policy["return"]) == (1.5, 1.25)


def test_a_run_keeps_every_group_of_the_steps_that_its_settings_choose() -> None:
    """4 instances with 4 games each, of steps 1 and 4; the mean over the seats that moved is the
    step's reward."""
    run = finished()
    groups = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    assert [group["step"] for group in groups] == [1] * 4 + [4] * 4
    assert all([game["episode"] for game in group["games"]] == [0, 1, 2, 3] for group in groups)
    for line in (metrics_of(run)[0], metrics_of(run)[3]):
        of_step = [group for group in groups if group["step"] == line["step"]]
        seats = [s for group in of_step for game in group["games"] for s in game["seats"]]
        rewards = [seat["reward"] for seat in seats if "reward" in seat]
        assert 24 <= len(rewards) <= 32 == len(seats)
        assert sum(rewards) / len(rewards) == pytest.approx(line["reward"])
        for group in of_step:
            for seat in (0, 1):
                credit = [game["seats"][seat] for game in group["games"]]
                credit = [one for one in credit if "reward" in one]
                advantages = [one["advantage"] for one in credit]
                if advantages[0] is None:
                    assert len({one["reward"] for one in credit}) == 1
                else:  # the group's mean is the baseline
                    assert sum(advantages) == pytest.approx(0, abs=1e-9)
                    assert len({one["reward"] for one in credit}) > 1
