"""Opponents by results, by hand; ratings by Elo's formula; a league's run, its file and page."""

import json
import math

import pytest

from selfplay.apps.report.page import page_html
from selfplay.apps.report.run_files import read_run
from selfplay.distributed import init_world
from selfplay.evaluation.tables import mean_interval
from selfplay.league.opponents import LEAST, League
from selfplay.league.page import section_of
from selfplay.league.rating import bradley_terry
from selfplay.league.table import payoffs
from selfplay.partners.opponents import Result, drawn, make_opponents
from tests.helpers.small_games import config_of
from tests.helpers.tiny_run import RUNS, finished, metrics_of

PARTNERS = "rollout.partners=[self*0.5,pool*0.3,scripted:solo*0.2]"
MEMBERS = ["pool:0", "pool:20", "pool:40"]


def league_of(*words: str) -> League:
    league = make_opponents(config_of(PARTNERS, "rollout.opponents=league", *words), {})
    assert isinstance(league, League)
    return league


def test_the_weights_of_members_by_hand() -> None:
    """Eight games at 0.25 and one draw in thought: (2 + 0.5) / 9 = 5/18. Nine more at 1.0, the
    earlier ones as 7.2 games at 0.25: (1.8 + 9 + 0.5) / 17.2."""
    league = league_of()
    assert league.score("pool:0") == 0.5
    league.played(3, {"pool:0": Result(8, 0.25, 0.75), "self": Result(8, 0.5, 0.5)})
    assert league.score("pool:0") == pytest.approx(5 / 18)
    assert league.weight("pool:0") == pytest.approx((13 / 18) ** 2 + LEAST)
    assert league_of("rollout.options.power=1").weight("pool:0") == 0.5 + LEAST
    league.played(4, {"pool:0": Result(9, 1.0, 0.0)})
    assert league.score("pool:0") == pytest.approx(11.3 / 17.2)
    assert list(league.results) == ["pool:0"], "only of members"
    close = league_of("rollout.options.by=close")
    close.played(1, {"pool:0": Result(8, 0.25, 0.75)})
    assert close.weight("pool:0") == pytest.approx(5 / 18 * 13 / 18 + LEAST)
    assert league_of("rollout.options.by=uniform").weight("pool:0") == 1.0 + LEAST


def test_a_member_that_wins_is_drawn_in_proportion_to_its_weight() -> None:
    """Over 2,000 steps: within four standard errors."""
    league = league_of()
    for name, score in zip(MEMBERS, (0.9, 0.5, 0.1), strict=True):
        league.played(0, {name: Result(10_000, score, 1 - score)})
    weights = [league.weight(name) for name in MEMBERS]
    num = 2_000
    draws = [next(n for n in league.draw(step, MEMBERS) if "pool" in n) for step in range(num)]
    for name, weight in zip(MEMBERS, weights, strict=True):
        share = weight / sum(weights)
        spread = math.sqrt(share * (1 - share) / num)
        assert abs(draws.count(name) / num - share) < 4 * spread


def test_the_share_of_the_pool_is_split_over_different_members() -> None:
    """The others keep theirs; a pool that is still small gives what it has."""
    league, world = league_of("rollout.options.members=2"), init_world(device="cpu")
    shares = dict(drawn(league, 7, MEMBERS, world))
    assert len(shares) == 4 and shares["self"] == 0.5 and shares["scripted:solo"] == 0.2
    assert sum(share for name, share in shares.items() if "pool" in name) == pytest.approx(0.3)
    assert dict(drawn(league, 7, MEMBERS[:1], world))["pool:0"] == pytest.approx(0.3)


def test_a_resumed_league_draws_what_it_would_have_drawn() -> None:
    straight, first = league_of(), league_of()
    for league in (straight, first):
        league.played(1, {"pool:20": Result(16, 0.1, 0.9), "pool:0": Result(16, 0.8, 0.2)})
    state = json.loads(json.dumps(first.state()))
    again = make_opponents(first.config, state)
    assert [again.draw(s, MEMBERS) for s in range(20)] == [
        straight.draw(s, MEMBERS) for s in range(20)
    ]
    straight.played(2, {"pool:20": Result(4, 1.0, 0.0)})
    assert again.state() == state, "it holds numbers of its own"


def test_two_players_are_rated_by_their_odds() -> None:
    """With many games the draw in thought does not matter: a score of 10/11 is odds of 10 to 1, 400
    points; no chance of a third who has met nobody."""
    rated = bradley_terry({("a", "b"): (1.1e7, 1e7), ("c", "c"): (5.0, 2.5)})
    assert rated["a"] - rated["b"] == pytest.approx(400.0, abs=0.01)
    assert set(rated) == {"a", "b"} and sum(rated.values()) == pytest.approx(0.0, abs=1e-9)


def test_ratings_add_up_along_a_chain_and_stay_finite() -> None:
    """a beats b as b beats c. One that has won all of its games has a finite rating."""
    rated = bradley_terry({("a", "b"): (3e7, 2e7), ("b", "c"): (3e7, 2e7)})
    gap = 400 * math.log10(2)
    assert rated["a"] - rated["b"] == pytest.approx(gap, abs=0.01)
    assert rated["a"] - rated["c"] == pytest.approx(2 * gap, abs=0.01)
    won = bradley_terry({("a", "b"): (20.0, 20.0)})
    assert 300 < won["a"] - won["b"] < 1500


def test_the_table_by_hand() -> None:
    """A pool of every second step: steps 1 and 2 became pool:2, step 3 pool:4."""
    lines = [
        {"step": 1, "partner": "pool:0", "scores": [[0.0, 1.0, 1], [1.0, 0.0, 2]]},
        {"step": 2, "partner": "pool:0", "scores": [[1.0, 0.0, 1]]},
        {"step": 3, "partner": "pool:2", "scores": [[0.5, 0.5, 2]]},
        {"step": 3, "partner": "scripted:solo", "scores": [[1.0, 0.5, 3]]},
    ]
    table = payoffs(lines, every=2)
    assert table is not None and table.rows == ["pool:2", "pool:4"]
    assert table.columns == ["pool:0", "pool:2", "scripted:solo"]
    assert table.cells[0] == [mean_interval([0.0, 1.0, 1.0, 1.0]), None, None]
    assert table.cells[1][1] == mean_interval([0.5, 0.5])
    assert table.ratings["pool:2"] > table.ratings["pool:0"]
    assert table.ratings["pool:4"] > table.ratings["scripted:solo"]
    assert payoffs([], every=2) is None
    shared = payoffs([{"step": 1, "partner": "pool:0", "scores": [[0.9, 0.9, 4]]}], every=2)
    assert shared is not None and shared.ratings == {}, "who shares a score wins nothing"
    assert "rating" not in section_of(shared)


def test_a_period_of_one_of_several_policies_is_rated_as_its_own_snapshot() -> None:
    """Left beats right's past, then right loses to left's: one player each, with both games."""
    lines = [
        {"step": 2, "partner": "right=pool:0", "scores": [[1.0, 0.0, 3]]},
        {"step": 12, "partner": "left=pool:2", "scores": [[0.0, 1.0, 2]]},
        {"step": 12, "partner": "right=scripted:fair:at=2", "scores": [[0.5, 0.5, 1]]},
    ]
    table = payoffs(lines, every=2, policies=["left", "right"])
    assert table is not None and table.rows == ["left=pool:2", "left=pool:12", "right=pool:12"]
    assert table.columns == ["left=pool:2", "right=pool:0", "right=scripted:fair:at=2"]
    assert table.cells[2][0] == mean_interval([0.0, 0.0]) and table.cells[0][0] is None
    assert table.ratings.keys() == {*table.rows, *table.columns}
    best = max(table.ratings, key=table.ratings.__getitem__)
    assert best == "left=pool:2", "the period and its snapshot won all five"


def test_a_run_keeps_its_results_and_its_page_shows_them() -> None:
    """The scores of the file are those of the metrics, half of them from each seat."""
    run = finished(*RUNS["league"])
    lines = [json.loads(line) for line in (run / "league.jsonl").read_text().splitlines()]
    for step in metrics_of(run):
        for line in (line for line in lines if line["step"] == step["step"]):
            scores = [score for score, _, num in line["scores"] for _ in range(num)]
            mean = sum(scores) / len(scores)
            by_seat = [step[f"score/{line['partner']}/{seat}"] for seat in (0, 1)]
            assert mean == pytest.approx(sum(by_seat) / 2)
    assert {line["step"] for line in lines} == {1, 2, 3}
    page = page_html([read_run(run)])
    assert '<section id="league">' in page and "<td>pool:1</td>" in page
    assert "rating</th>" not in page, "the boards' players share their score"
    assert '<section id="league">' not in page_html([read_run(finished())])


def test_a_names_markup_is_escaped() -> None:
    table = payoffs([{"step": 1, "partner": "<b>", "scores": [[1.0, 0.0, 1]]}], every=1)
    assert table is not None
    page = section_of(table)
    assert "&lt;b&gt;" in page and "<b>" not in page
