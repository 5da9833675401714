"""What the seats of a game can reach: raised by what is told truthfully, and by nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from dialop.logged import Rules
from dialop.matching.board import MatchingInstance
from dialop.matching.game import MatchingGame
from dialop.mediation.game import MediationGame
from dialop.planning.game import PlanningGame
from dialop.planning.score import referenced
from tests.helpers.dialop_boards import BEST, WORST, play
from tests.helpers.mediation_games import SCORES, proposal
from tests.helpers.mediation_games import SMALL as FLIGHTS
from tests.helpers.planning_cities import BRIEF, ONE, PREFERENCES

# Each seat sees one row. Seat 0 takes the other row for 5 and 5, so 4 + 5 looks better than 2 + 5:
# the plan of 4 + 1 = 5 points. Seat 1 prefers 5 + 8 to 5 + 1: the best plan, of 2 + 8 = 10.
ROWS = MatchingInstance(
    key="hand/rows",
    size=2,
    table=((2, 4), (1, 8)),
    masks=(((1, 1), (0, 0)), ((0, 0), (1, 1))),
    scales=(1.0, 1.0),
    first_seat=1,
    best=10,
    solo=(5.0, 10.0),
    max_value=10,
)


@pytest.mark.parametrize(
    ("said", "reached"),
    [
        (["Daniel BLEU 1, Daniel Electra 8"], [1.0]),
        (["Daniel Electra 8"], [1.0]),  # 2 + 8 is above 4 + 5
        (["Daniel BLEU 1"], [1.0]),  # 2 + 5 is above 4 + 1
        (["Daniel Electra 1"], [0.5]),  # a lie
        (["Ava BLEU 9"], [0.5]),  # of a cell that seat 1 does not see
        (["hello"], [0.5]),
        (["Daniel Electra 8", "Daniel Electra 8"], [1.0, 1.0]),  # a repetition
        (["Daniel Electra 8", "Daniel Electra 1"], [1.0, 0.5]),  # the last word counts
        (["Daniel Electra 8", "Daniel Electra 1", "Daniel Electra 8"], [1.0, 0.5, 1.0]),
    ],
)
def test_only_what_a_seat_is_truthfully_told_raises_what_it_can_reach(
    said: list[str], reached: list[float]
) -> None:
    game = MatchingGame(ROWS, Rules())
    assert game.reach() == [(0.5, 1.0)]
    for text in said:
        play(game, (1, f"[message] {text}"), (0, "[message] go on"))
    assert [of for of, _ in game.reach()] == [0.5, *(of for of in reached for _ in (0, 1))]
    assert {of for _, of in game.reach()} == {1.0}, "seat 1 was told nothing"


def test_plans_and_answers_leave_what_can_be_reached_and_units_do_not_count() -> None:
    game = play(MatchingGame(ROWS, Rules()), (1, "[message] Daniel BLEU 1"), (0, WORST))
    play(game, (1, "[reject]"), (1, BEST), (0, "[accept]"))
    assert game.reach() == [(0.5, 1.0)] + [(1.0, 1.0)] * 5
    scaled = MatchingGame(replace(ROWS, scales=(3.0, 2.0)), Rules())
    assert play(scaled, (1, "[message] Daniel Electra 16")).reach()[1] == (1.0, 1.0)


def test_moves_before_play_count_as_known_and_have_no_entry() -> None:
    first = play(MatchingGame(ROWS, Rules()), (1, "[message] Daniel Electra 8"))
    later = MatchingGame(replace(ROWS, opening=first.moves), Rules())
    assert later.reach() == [(1.0, 1.0)]


def test_an_agent_of_planning_reaches_the_best_plan_for_the_preferences_it_was_told() -> None:
    """One site of three, parking (4) and live music (5): Saul's 4, The Dive 1, Atlas Park 0.

    Without a preference all look alike, of (1 + 1/4 + 0) / 3. With live music The Dive looks best.
    """
    parking, music = (f"[message] {p.text}" for p in PREFERENCES[:2])
    game = play(PlanningGame(ONE, BRIEF), (0, music), (1, "[tool] Search()"), (1, "[message] more"))
    play(game, (0, parking), (1, "[message] more"), (0, parking), (1, "[propose] [Atlas Park]"))
    told = [5 / 12, 0.25, 0.25, 0.25]
    # Both preferences: The Dive loses 5.5 of its 5.5 mean points and Saul's gains as many.
    assert [of for of, _ in game.reach()] == pytest.approx([*told, 1.0, 1.0, 1.0, 1.0])
    lie = f"[message] {PREFERENCES[3].text}"
    assert play(PlanningGame(ONE, BRIEF), (0, lie)).reach()[1] == game.reach()[0]


@pytest.mark.parametrize(("score", "reached"), [("Saul's: 2", 1.0), ("Saul's: 9", 0.5)])
def test_true_scores_count_in_planning_and_false_ones_do_not(score: str, reached: float) -> None:
    """One site has parking (2 points), the other live music (9); of unknown weight both look alike.
    The points of the first tell the agent that the second is better."""
    sites = [replace(ONE.sites[i], features={PREFERENCES[i].name: True}) for i in (0, 1)]
    preferences = [replace(PREFERENCES[i], weight=(2, 9)[i]) for i in (0, 1)]
    city = referenced("hand/weights", sites, preferences, slots=1)
    told = f"[message] {preferences[0].text}. {preferences[1].text}"
    game = play(PlanningGame(city, BRIEF), (0, told), (1, "[propose] [Saul's]"), (0, "[reject]"))
    play(game, (0, f"[message] {score}"))
    assert [of for of, _ in game.reach()] == [0.5, 0.5, 0.5, 0.5, reached]


def test_an_agent_of_mediation_reaches_the_pair_of_the_costs_it_was_told() -> None:
    hidden = [
        replace(user, events=tuple(replace(event, shared=False) for event in user.events))
        for user in FLIGHTS.users
    ]
    trip = replace(FLIGHTS, users=(hidden[0], hidden[1]), max_price_pref=0, max_arrival_pref=0)
    norms = {pair: trip.norm(score) for pair, score in SCORES.items()}
    costs = ["[message]\n0 -4\n1 -7\n2 -11", "[message]\n0 -2\n1 -9"]
    game = MediationGame(trip, Rules(brief=True))
    play(game, (0, costs[0]), (1, costs[1]), (2, proposal(2, 1)), (0, "[reject]"), (1, "[accept]"))
    start = sum(norms.values()) / 6
    told = (norms[0, 0] + norms[0, 1]) / 2
    reached = [start, told, 1.0, 1.0, 1.0, 1.0]
    assert game.reach() == pytest.approx(np.array([reached] * 3).T)
    for lie in ("[message]\n0 0\n1 0", "[message] hello"):
        lied = play(MediationGame(trip, Rules(brief=True)), (0, lie), (1, costs[1]))
        assert lied.reach()[1] == pytest.approx([start] * 3)
