"""Scripted players of mediation and their statements: exact reading, honest play, real figures."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dialop.kit import load_kit
from dialop.logged import Rules
from dialop.mediation import wording
from dialop.mediation.game import MediationGame
from dialop.mediation.generate import MediationRecipe
from dialop.mediation.records import (
    AGENT,
    FIRST_DAY,
    AgentView,
    Costs,
    Event,
    Flight,
    MediationInstance,
    UserView,
)
from dialop.mediation.scripted import arrival_weight, believed_best, make_scripted, price_points
from dialop.mediation.statements import count_true, read_statements
from tests.helpers.dialop_boards import play
from tests.helpers.mediation_games import BRIEF, FULL, SCORES, SILENT, SMALL, proposal

generate = load_kit("mediation").generate

INSTANCES = generate(MediationRecipe(), seed=1_000_003, num=40)
SPECS = ("random", "solo", "honest", "honest:tell=top", "honest:tell=calendar,probe=1")


def played(
    instance: MediationInstance, specs: Sequence[str], options: Rules, seed: int = 0
) -> MediationGame:
    game = MediationGame(instance, options)
    players = [make_scripted(spec, seed=seed) for spec in specs]
    for _ in range(60):
        if (seat := game.seat_to_move) is None:
            break
        game.step(seat, players[seat].act(game.view(seat)))
    return game


def mean_norm(spec: str, options: Rules = FULL) -> float:
    games = [played(inst, [spec] * 3, options, seed=i) for i, inst in enumerate(INSTANCES)]
    assert all(game.outcome().agreed for game in games)
    return statistics.fmean(game.outcome().score_norm for game in games)


def test_what_players_tell_is_worth_something() -> None:
    random, solo = mean_norm("random"), mean_norm("solo")
    told, probed = mean_norm("honest"), mean_norm("honest:tell=calendar,probe=1")
    assert 0.5 < random < 0.7 and random + 0.2 < solo
    assert solo < told < probed and probed > 0.985
    assert mean_norm("honest:probe=1", BRIEF) > 0.985
    assert mean_norm("solo", SILENT) == pytest.approx(solo, abs=0.005)


def test_an_agent_that_writes_values_proposes_the_best_pair_of_them() -> None:
    """A loss is in steps of 11/6 points, so an hour between the arrivals, which costs both users a
    third of the mean weight, is two steps."""
    options = Rules(brief=True, private_reasoning=True)
    assert mean_norm("honest:think=values", options) > mean_norm("honest", options) - 0.015
    player = make_scripted("honest:think=values", seed=0)
    for instance in INSTANCES[:10]:
        game = MediationGame(instance, options)
        for _ in range(2):
            game.step(game.seat_to_move or 0, player.act(game.view(game.seat_to_move or 0)))
        *lines, move = player.act(game.view(AGENT)).splitlines()
        usual = [int(line.split()[-1]) for line in lines[:2]]
        rows = [
            [user[-1], *line.replace("id ", "").split()]
            for user, line in zip(lines[2::2], lines[3::2], strict=True)
        ]
        hours = [[flight.end // 60 for flight in user.flights] for user in instance.users]
        order = sorted((h, u, i) for u in (0, 1) for i, h in enumerate(hours[u]))
        assert [(row[4], row[0], row[1]) for row in rows] == [
            (f"{hour}:", str(user), str(i)) for hour, user, i in order
        ]
        assert [row[5] for row in rows] == [
            f"{hours[u][i + 1]}:" if i + 1 < len(hours[u]) else "-" for _, u, i in order
        ]
        losses: list[list[int]] = [[], []]
        for user, flight, _, dollars, _, _, cost, price, gap, loss, *_ in rows:
            own = instance.users[int(user)].flights[int(flight)]
            assert int(cost) == game.view(int(user)).calendar_costs[int(flight)]  # type: ignore[union-attr]
            assert int(dollars) == own.price and 0 <= int(gap) <= 6
            assert int(price) == round(8 * (own.price // 10 / usual[int(user)] - 1) / (11 / 6))
            assert int(loss) == min(round(-int(cost) / (11 / 6)) + int(price), 12)
            losses[int(user)].append(int(loss))
        total = {
            (a, b): losses[0][a] + losses[1][b] + 2 * abs(hours[0][a] - hours[1][b])
            for a in range(len(losses[0]))
            for b in range(len(losses[1]))
        }
        first, second, found = (int(word) for word in rows[-1][-3:])
        assert total[first, second] == found == min(total.values()) < 12
        assert move == f"all: [propose] user 0: id {first}, user 1: id {second}"
    with pytest.raises(ValueError, match="needs a game with private_reasoning"):
        player.act(MediationGame(INSTANCES[0], BRIEF).view(0))


def clock_hour(text: str) -> str:
    """`6/1 1 AM` as `25:`, the hour from the first midnight; "-" for none."""
    if text == "-":
        return text
    day, hour, half = text.split()
    days = (date(2023, *map(int, day.split("/"))) - FIRST_DAY).days
    return f"{24 * days + int(hour) % 12 + 12 * (half == 'PM')}:"


def test_private_values_are_the_same_numbers_in_english() -> None:
    line = re.compile(
        r"user (\d) id (\d+) \$(\d+) (.+), next (.+): costs (\d+), price (-?\d+), "
        r"hours (\d), loss (-?\d+); (.+); (.+)"
    )
    player = make_scripted("honest:think=values", seed=0)
    for instance in INSTANCES[:10]:
        found = []
        for style in (BRIEF, FULL):
            game = MediationGame(instance, replace(style, private_reasoning=True))
            for _ in range(2):
                game.step(game.seat_to_move or 0, player.act(game.view(game.seat_to_move or 0)))
            found.append(player.act(game.view(AGENT)).splitlines())
            flights = sum(len(user.flights) for user in instance.users)
            assert game.measures([0, 1])["true_statements"] == flights
        brief, full = found
        assert [int(text.split()[-1]) for text in brief[:2]] == [
            int(text.partition("$")[2]) // 10 for text in full[:2]
        ]
        for number, text in enumerate(full[2:-1]):
            match = line.fullmatch(text)
            assert match is not None
            user, flight, price, hour, following, cost, *values = match.groups()
            copied = [flight, price, clock_hour(hour), clock_hour(following)]
            row = brief[3 + 2 * number].split()
            assert brief[2 + 2 * number] == f"Flights {user}"
            assert [row[0], *row[2:5]] == copied and int(row[5]) == -int(cost)
            assert row[6:] == " ".join(values).split()
        assert len(brief) == 2 * len(full) - 3 and brief[-1] == full[-1]


def test_in_english_a_user_adds_up_what_each_flight_overlaps() -> None:
    event, flight = partial(Event, shared=False), partial(Flight, "Delta", price=50)
    events = [event(600, 660, 3), event(660, 720, 4), event(2040, 2100, 10)]
    assert wording.overlap_lines([flight(630, 700), flight(2000, 2050)], events) == [
        "id 0 5/31 10:30 AM - 5/31 11:40 AM, (3) 10:00 AM 3, (4) 11:00 AM 7",
        "id 1 6/1 9:20 AM - 6/1 10:10 AM, (10) 10:00 AM 10",
    ]
    options = replace(FULL, private_reasoning=True)
    for spec in ("honest:think=values", "honest:think=values,slip=1"):
        for instance in INSTANCES[:10]:
            game = MediationGame(instance, options)
            text = make_scripted(spec, seed=0).act(game.view(0))
            assert (game.step(0, text).error is None) != ("slip" in spec)
            if "slip" not in spec:
                view = game.view(0)
                assert isinstance(view, UserView)
                *lines, message = text.splitlines()
                sums = [int(line.split()[-1]) for line in lines]
                assert sums == [-cost for cost in view.calendar_costs]
                assert read_statements(message, brief=False).costs == dict(
                    enumerate(view.calendar_costs)
                )


def test_an_agent_that_strays_values_flights_as_well_and_books_at_random() -> None:
    options = Rules(brief=True, private_reasoning=True)
    sure, stray = (mean_norm(f"honest:think=values,stray={s}", options) for s in (0, 0.5))
    assert mean_norm("random", options) + 0.1 < stray < sure - 0.1
    assert 0.5 < mean_norm("honest:think=values,stray=1", options) < 0.7
    thinker, strayer = (make_scripted(f"solo:think=values,stray={s}", seed=3) for s in (0, 1))
    game = MediationGame(INSTANCES[0], options)
    for _ in range(2):
        game.step(game.seat_to_move or 0, thinker.act(game.view(game.seat_to_move or 0)))
    best, random = (p.act(game.view(AGENT)).rsplit("\n", 1) for p in (thinker, strayer))
    assert best[0] == random[0] and best[1] != random[1]


@pytest.mark.parametrize("options", [FULL, BRIEF])
@pytest.mark.parametrize("spec", ["honest:probe=1", "honest:tell=top", "honest:tell=calendar"])
def test_honest_users_state_only_what_is_true(spec: str, options: Rules) -> None:
    for seed, instance in enumerate(INSTANCES[:8]):
        game = played(instance, [spec] * 3, options, seed=seed)
        for user in (0, 1):
            measures = game.measures([user])
            assert measures["statements"] == measures["true_statements"] >= 3


def user_view(options: Rules = FULL) -> UserView:
    view = MediationGame(SMALL, options).view(0)
    assert isinstance(view, UserView)
    return view


@pytest.mark.parametrize(
    ("text", "brief", "true", "stated"),
    [
        ("id 0 costs 4, flight 1: 7, id 2 costs me 11.", False, 3, 3),
        ("id 0 costs 5, id 9 costs 1", False, 0, 2),
        ("id 0 costs 4.5 and id 1 costs 7%", False, 0, 0),
        ("(4) 5/31 10:00 AM - 5/31 12:00 PM; (8) 5/31 2:00 PM - 5/31 3:00 PM", False, 1, 2),
        ("It gives me calendar -4, price 5, arrival -1.", False, 0, 1),
        ("I like mornings.", False, 0, 0),
        ("id 0 costs 4 thousand, id 0 costs 4,500, id 0 costs 4e2", False, 0, 0),
        ("It is not true that id 0 costs 4, does id 0: 4? If flight 1: 7.", False, 0, 0),
        ("I don’t have (4) 5/31 10:00 AM - 5/31 12:00 PM", False, 0, 0),
        ("It never gives me calendar -4, price 5, arrival -1", False, 0, 0),
        ("It gives me calendar -4, price 5, arrival -12345", False, 0, 0),
        ("0 -4\n1 -6\n2 -11", True, 2, 3),
        ("0 -4 3", True, 0, 1),
        ("id 0 costs 4", True, 0, 0),
    ],
)
def test_true_and_false_statements_are_counted(
    text: str, brief: bool, true: int, stated: int
) -> None:
    assert count_true(user_view(BRIEF if brief else FULL), text, ()) == (true, stated)


def test_terms_are_true_of_the_last_proposal_before_them() -> None:
    game = play(MediationGame(SMALL, BRIEF), (0, "[message] a"), (1, "[message] b"))
    play(game, (2, proposal(1, 0)), (0, "[reject]"), (1, "[reject]"))
    play(game, (0, "[message] -7 -5 -3"), (1, "[message] -2 1 -3"))
    assert game.measures([0])["true_statements"] == 1.0
    assert game.measures([1]) == {**game.measures([1]), "statements": 1.0, "true_statements": 0.0}
    play(game, (2, proposal(0, 0)), (0, "[reject]"), (1, "[accept]"), (0, "[message] -7 -5 -3"))
    assert (game.measures([0])["true_statements"], game.measures([0])["statements"]) == (1.0, 2.0)
    every = game.measures([0, 1, AGENT])
    assert every == {
        "words": 11.0, "proposals": 2.0, "rejections": 3.0, "questions": 0.0,
        "statements": 3.0, "true_statements": 1.0,
    }  # fmt: skip
    restored = load_kit("mediation").restore(json.loads(json.dumps(game.state())))
    assert restored.measures([0, 1, AGENT]) == every


@given(st.dictionaries(st.integers(0, 199), st.integers(-130, 0), min_size=1), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_wording_is_read_back(costs: dict[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for brief in (False, True):
        text = wording.costs_message(costs, rng, brief=brief).removeprefix("[message]").strip()
        assert read_statements(text, brief).costs == costs
        terms = Costs(-seed, seed - 50, -2)
        text = wording.terms_message(terms, rng, brief=brief).removeprefix("[message]").strip()
        assert read_statements(text, brief).terms == terms
    events = INSTANCES[seed % 40].users[0].events
    text = wording.events_message(events, rng).removeprefix("[message]").strip()
    read = read_statements(text, False).events
    assert [tuple(s) for s in read] == [(e.start, e.end, e.importance) for e in events]


def test_the_agent_books_the_best_pair_of_what_it_was_told() -> None:
    plain = replace(SMALL, max_price_pref=0, max_arrival_pref=0)
    game = MediationGame(plain, BRIEF)
    play(game, (0, "[message]\n0 -9\n1 -1\n2 -8"), (1, "[message]\n0 -9\n1 0"))
    view = game.view(AGENT)
    assert isinstance(view, AgentView)
    assert believed_best(view, np.random.default_rng(0)) == (1, 1)
    assert make_scripted("honest", seed=0).act(view) == proposal(1, 1)


def test_an_agent_that_knows_nothing_books_any_flight() -> None:
    plain = replace(SMALL, max_price_pref=0, max_arrival_pref=0)
    game = play(MediationGame(plain, BRIEF), (0, "[message] hi"), (1, "[message] hi"))
    moves = {make_scripted("solo", seed=seed).act(game.view(AGENT)) for seed in range(30)}
    # User 0's flights 0 and 2 overlap a shared event, flight 1 does not; user 1's likewise.
    assert moves == {proposal(1, 1)}
    hidden = [
        replace(user, events=tuple(replace(event, shared=False) for event in user.events))
        for user in plain.users
    ]
    game = MediationGame(replace(plain, users=(hidden[0], hidden[1])), BRIEF)
    play(game, (0, "[message] hi"), (1, "[message] hi"))
    moves = {make_scripted("solo", seed=seed).act(game.view(AGENT)) for seed in range(60)}
    assert moves == {proposal(*pair) for pair in SCORES}


def test_the_agent_asks_a_silent_user_once_and_tries_another_flight_after_a_rejection() -> None:
    game = play(MediationGame(SMALL, FULL), (0, "[message] hi"), (1, "[message] id 0 costs 2"))
    agent = make_scripted("honest", seed=0)
    assert agent.act(game.view(AGENT)).startswith("0: [message] ")
    play(game, (2, agent.act(game.view(AGENT))), (0, "[message] no idea"))
    first = agent.act(game.view(AGENT))
    assert first.startswith("all: [propose] ")
    play(game, (2, first), (0, "[reject]"), (1, "[accept]"), (0, "[message] no"))
    second = agent.act(game.view(AGENT))
    assert second.startswith("all: [propose] ") and second != first


def test_prices_and_the_arrival_weight_are_learned_from_terms() -> None:
    prices = [100, 300, 200, 250, 150]
    prior = price_points(prices, [], max_weight=20)
    assert prior[0] > 0 > prior[1]
    # The weight is 2 and the mean 200; two stated terms show that prices hardly count.
    told = price_points(prices, [(100, 1), (300, -1)], max_weight=20)
    assert abs(told[1]) < abs(prior[1]) / 3
    assert price_points(prices, [], max_weight=0).tolist() == [0.0] * 5
    assert arrival_weight([], max_weight=10) == 5.5
    assert arrival_weight([(9, -21)], max_weight=10) == 7.0
    assert arrival_weight([(1, -1)], max_weight=10) == 4.0
    assert arrival_weight([(9, -99)], max_weight=10) == 5.5
    assert arrival_weight([(9, -21)], max_weight=0) == 0.0


def test_a_strict_user_rejects_a_flight_far_below_its_best() -> None:
    game = play(MediationGame(SMALL, FULL), (0, "[message] hi"), (1, "[message] hi"))
    play(game, (2, proposal(2, 0)))
    view = game.view(0)
    assert make_scripted("solo:strict=9", seed=0).act(view) == "[reject]"
    assert make_scripted("solo:strict=10", seed=0).act(view) == "[accept]"  # -4 - (-13) is 9
    assert make_scripted("honest:probe=1", seed=0).act(view) == "[reject]"
    assert make_scripted("solo", seed=0).act(view) == "[accept]"
