"""The metrics of played games, counted by hand on a small board."""

import json
from dataclasses import replace

import pytest

from dialop.logged import Rules
from dialop.matching.game import MatchingGame
from selfplay.advantages.advantages import CreditStats
from selfplay.distributed import init_world
from selfplay.metrics.records import game_record
from selfplay.metrics.step import GameSums, game_sums, step_metrics
from selfplay.rollout.driver import RolloutStats, play_scripted
from selfplay.rollout.episode import Episode, GameSetup, Limits
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL, WORST
from tests.helpers.small_games import Lines


def played(seat_0: list[str], seat_1: list[str], index: int = 0, options: Rules = BRIEF) -> Episode:
    setup = GameSetup(
        MatchingGame(SMALL, options), (Lines(*seat_0), Lines(*seat_1)), SMALL.key, index
    )
    (episode,) = play_scripted([setup], limits=Limits(max_turns=6, max_retries=1))
    return episode


# Seat 0 has Ava BLEU 3 and Daniel Electra 9: one true statement, one false one. They agree on the
# best matching.
TALKED = played(["[message] Ava BLEU 3, Daniel Electra 8", "[accept]"], ["hm", BEST])
# They agree on the other matching, 8 of 12, without messages.
SILENT = played([WORST], ["[accept]"])
# Two refused moves in a row end the game.
FAILED = played(["a", "[accept]"], [])


def test_means_by_hand() -> None:
    means = game_sums([TALKED, SILENT, FAILED]).means()
    assert means["score"] == pytest.approx((1 + 8 / 12 + 0) / 3)
    assert means["agreement"] == pytest.approx(2 / 3)
    assert means["optimal"] == pytest.approx(1 / 3)
    assert means["messages"] == pytest.approx(1 / 3)
    assert means["proposals"] == pytest.approx(2 / 3)
    assert means["turns"] == pytest.approx((4 + 2 + 2) / 3)
    assert means["errors"] == pytest.approx(3 / 3)
    assert means["errors_no_tag"] == pytest.approx(2 / 3)
    assert means["errors_nothing_pending"] == pytest.approx(1 / 3)
    assert means["statements"] == pytest.approx(2 / 3)
    assert means["honesty"] == 0.5
    assert "honesty" not in game_sums([SILENT]).means(), "nothing was stated"


def test_a_games_own_measures_may_have_any_prefix() -> None:
    """The step's counters begin with num_ and branch_; a game's are means and do not meet them."""
    own = {"num_hints": 3.0, "branch_depth": 4.0, "hints": 5.0}
    games = [replace(SILENT, measures=own) for _ in range(2)]
    world = init_world(device="cpu")
    played = RolloutStats(num_prompt_tokens=1, num_generated_tokens=1, engine_s=1.0)
    metrics = step_metrics(games, played, CreditStats(2, 0), {}, world)
    assert {name: metrics[name] for name in own} == own
    assert metrics["num_games"] == 2


def test_private_reasoning_counts_as_no_statement_and_no_word() -> None:
    thoughts = "Ava BLEU 5\nAva Electra 5 [sure]\n"
    options = Rules(brief=True, private_reasoning=True)
    episode = played([thoughts + "[message] Ava BLEU 3", "[accept]"], [thoughts + BEST], 0, options)
    means = game_sums([episode]).means()
    assert (means["statements"], means["honesty"], means["words"]) == (1, 1, 3)
    assert episode.messages([0, 1]) == ["Ava BLEU 3"] and episode.messages([1]) == []


def test_tallies_of_ranks_add_up() -> None:
    """Means over all games do not depend on which rank played which game."""
    expected = game_sums([TALKED, SILENT, FAILED]).means()
    parts = (game_sums(games) for games in ([TALKED], [], [SILENT, FAILED]))
    assert sum(parts, GameSums()).means() == pytest.approx(expected)


def test_a_step_line_by_hand() -> None:
    stats = RolloutStats(num_void=3, num_prompt_tokens=70, num_generated_tokens=30, engine_s=0.5)
    line = step_metrics(
        [TALKED, SILENT],
        stats,
        CreditStats(num_groups=4, num_zero_variance_groups=1),
        {"grad_norm": 2.0},
        init_world(device="cpu"),
    )
    assert line["void_share"] == 3 / (3 + 2)
    assert line["zero_variance_groups"] == 0.25 and line["grad_norm"] == 2.0
    assert (line["num_games"], line["num_generated_tokens"], line["tokens_per_s"]) == (2, 30, 60.0)
    assert "games" not in line and "num_zero_variance_groups" not in line
    assert all(isinstance(value, int | float) for value in line.values())


def test_a_game_record_is_json_with_both_seats_prompts() -> None:
    record = json.loads(json.dumps(game_record(TALKED, step=5)))
    assert (record["step"], record["score_norm"], record["ended"]) == (5, 1.0, "finished")
    assert record["seats"][0]["user"].startswith("Ava BLEU 3")
    assert record["seats"][1]["user"].startswith("Ava BLEU ?")
    turns = [(t["seat"], t["error"] is None) for t in record["turns"]]
    assert turns == [(0, True), (1, False), (1, True), (0, True)]
