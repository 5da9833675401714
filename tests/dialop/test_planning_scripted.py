"""Scripted users and agents of planning: legal at every turn, pure, and as good as they claim."""

import statistics
from dataclasses import replace

import pytest

from dialop.kit import load_kit
from dialop.planning.board import PlanningInstance, PlanningOptions
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe
from dialop.planning.preferences import stated_in
from dialop.planning.recorded import recorded_tally
from dialop.planning.scripted import (
    best_plan,
    facts_of,
    make_scripted,
    scored_in,
    stated_preferences,
)
from dialop.rows import read_records
from tests.helpers.dialop_boards import human_games, play
from tests.helpers.planning_cities import FULL, HAND, PLAN, PREFERENCES, SILENT, new_game

generate = load_kit("planning").generate

SIMPLE = PlanningRecipe(sites=6, slots=1, preferences=2, distance=False, simple=True)
CITIES = generate(PlanningRecipe(), seed=21, num=30)
SMALL = generate(SIMPLE, seed=21, num=40)


def played(
    instance: PlanningInstance,
    user: str,
    agent: str,
    options: PlanningOptions = FULL,
    seed: int = 1,
) -> PlanningGame:
    """A full game of two scripted players; no move but a deliberate slip is refused."""
    game = PlanningGame(instance, options)
    players = [make_scripted(user, seed=seed), make_scripted(agent, seed=seed + 1)]
    for _ in range(80):
        seat = game.seat_to_move
        if seat is None:
            break
        step = game.step(seat, players[seat].act(game.view(seat)))
        assert step.error is None or "slip" in user + agent, step.error
    assert game.outcome().agreed
    return game


def mean_score(
    cities: list[PlanningInstance], user: str, agent: str, options: PlanningOptions = FULL
) -> float:
    return statistics.fmean(played(i, user, agent, options).outcome().score_norm for i in cities)


def test_the_best_pair_is_above_people_and_feedback_helps() -> None:
    # People's mean over all 113 recorded games is 0.886. The standard error here is about 0.01.
    once = mean_score(CITIES, "teller", "searcher")
    again = mean_score(CITIES, "teller:rounds=2", "searcher")
    assert once > 0.9 and again > 0.95 and again > once
    assert mean_score(CITIES, "teller", "guesser") == pytest.approx(0.52, abs=0.08)


@pytest.mark.parametrize("agent", ["searcher", "searcher:by=filter"])
def test_search_and_talk_pay_in_small_cities(agent: str) -> None:
    assert mean_score(SMALL, "teller", agent) > 0.9
    assert mean_score(SMALL, "silent", "guesser") < 0.7


@pytest.mark.parametrize("user", ["teller:tell=one", "teller:tell=asked,slip=0.3", "silent:slip=1"])
@pytest.mark.parametrize("agent", ["searcher:slip=0.3", "searcher:by=filter", "guesser"])
@pytest.mark.parametrize("options", [FULL, SILENT, PlanningOptions(search=False)])
def test_every_pair_plays_to_an_agreement(user: str, agent: str, options: PlanningOptions) -> None:
    for instance in (CITIES[0], SMALL[0], HAND):
        game = played(instance, user, agent, options)
        measured = game.measures((0, 1))
        assert measured["statements"] == measured["true_statements"]
        assert options.search or not measured["searches"]
        assert options.messages or not measured["words"]


def test_a_user_who_waits_is_asked() -> None:
    game = played(CITIES[0], "teller:tell=asked", "searcher")
    texts = [action.text for action in game.view(1).log if action.kind == "message"]
    assert texts[:2] == ["Hello!", "What would you like?"] and len(
        stated_preferences(game.view(1).log)
    )


@pytest.mark.parametrize("by", ["table", "filter"])
def test_a_site_that_the_city_lacks_is_not_searched_for(by: str) -> None:
    game = play(new_game(), (0, "[message] definitely want to go to The Cakery"))
    assert [p.sites for p in stated_preferences(game.view(1).log)] == [("The Cakery",)]
    play(game, (1, make_scripted(f"searcher:by={by}", seed=0).act(game.view(1))))
    assert game.num_errors == (0, 0)


def test_an_agent_learns_from_its_searches_and_from_told_scores() -> None:
    game = play(
        new_game(),
        (0, "[message] " + "; ".join(p.text for p in PREFERENCES)),
        (1, "[tool] Search(fields=[has parking, live music, price, category])"),
        (1, "[tool] Search(sort_by=[distance_to(Saul's)])"),
    )
    view = game.view(1)
    facts = facts_of(view.log)
    assert facts.values["The Dive"] == {
        "has parking": False, "live music": True, "price": 30.0, "category": "bar",
    }  # fmt: skip
    assert facts.tenths[("The Dive", "Saul's")] == 5 and len(facts.tenths) == 7
    told = stated_preferences(view.log)
    assert [p.text for p in told] == [p.text for p in PREFERENCES]
    play(game, (1, "[propose] [Saul's, The Dive, Atlas Park]"), (0, "[reject]"))
    play(game, (0, "[message] Saul's: 4; The Dive: 1; travel: -1; total: -10"))
    (scored,) = scored_in(game.view(1).log)
    assert scored.total == -10 and ("The Dive", 1) in scored.labels
    assert len(set(best_plan(game.view(1)))) == 3


def test_a_cell_tells_its_field_and_an_absent_feature_has_none() -> None:
    game = PlanningGame(CITIES[0], PlanningOptions())
    query = "Search(fields=[category, live music, price, rating], sort_by=[distance_to(The Dive)])"
    play(game, (0, "[message] hi"), (1, f"[tool] {query}"))
    facts = facts_of(game.view(1).log)
    for site in CITIES[0].sites:
        known = {"category": site.category, "price": float(site.price)}
        known |= {name: site.features.get(name) for name in ("live music", "rating")}
        assert facts.values[site.name] == known


@pytest.mark.parametrize("brief", [False, True])
def test_a_plan_by_points_is_the_best_site_of_a_block_between_good_ones_near_it(
    brief: bool,
) -> None:
    options, names = PlanningOptions(brief=brief, private_reasoning=True), CITIES[0].names
    game = PlanningGame(CITIES[0], options)
    wanted = "check out live music!; go to at least one bar; minimize travel distance"
    play(game, (0, f"[message] {wanted}"))
    thinker = make_scripted("searcher:think=points,plans=2", seed=0)
    play(game, (1, thinker.act(game.view(1))))
    *lines, move = thinker.act(game.view(1)).splitlines()
    parts = [line.rsplit("|", 1) for line in lines]
    points = {line.partition(" 0")[0]: int(line.split()[-1]) for line, _ in parts}
    bars = {s.name: 1 + {True: 1, None: 0, False: -1}[s.features.get("live music")]
            for s in game.instance.sites if s.category == "bar"}  # fmt: skip
    assert list(points) == sorted(names) and points.items() >= bars.items()
    blocks = sorted(names)[:20], sorted(names)[20:]
    centres = [max(block, key=lambda name: points[name]) for block in blocks]
    for i, (_, best_so_far) in enumerate(parts):
        block = blocks[i // 20][: i % 20 + 1]
        best = max(block, key=lambda name: points[name])
        assert best_so_far == f"{best} {points[best]}"
    for centre in centres:
        assert move == f"[tool] Search(sort_by=[distance_to({centre})], limit=13)"
        play(game, (1, move))
        *lines, move = thinker.act(game.view(1)).splitlines()
        near = [line.split("|")[0] for line in game.view(1).log[-1].result.splitlines()[3:]]
        assert len(near) == len(lines) == 12
        for i, line in enumerate(lines):
            best = sorted(near[: i + 1], key=lambda name: -points[name])[:2]
            assert line == "|".join(f"{name} {points[name]}" for name in (near[i], *best))
        assert move == f"[propose] [{best[0]}, {centre}, {best[1]}]"
        play(game, (1, move), (0, "[reject]"), (0, f"[message] total: {-len(best[0])}"))
        move = thinker.act(game.view(1))


def test_of_plans_by_points_the_one_with_the_best_told_total_is_agreed() -> None:
    options = PlanningOptions(brief=True, private_reasoning=True)
    users, agents = ("teller", "teller:rounds=3,score=total"), ("", ",plans=4")
    for instance in CITIES[:8]:
        game = played(instance, users[1], f"searcher:think=points{agents[1]}", options)
        totals = [sheet.total for sheet in game.view(0).sheets]
        assert len(totals) in (4, 5) and totals[-1] == max(totals)
        log = game.view(1).log
        moves = [a.text for a in log if a.seat == 1]
        assert sum("distance_to" in text for text in moves) == 4 and "|" not in "".join(moves)
        told = [a.text for a in log if a.seat == 0 and a.kind == "message"][1:]
        assert told == [f"total: {total}" for total in totals[:-1]]
        assert game.measures((0,))["true_statements"] == game.measures((0,))["statements"]
    one, four = (
        mean_score(CITIES, user, f"searcher:think=points{agent}", options)
        for user, agent in zip(users, agents, strict=True)
    )
    assert one > 0.86 and four > 0.92


def test_an_agent_that_strays_counts_as_well_and_chooses_at_random() -> None:
    """Of 40 cities with two plans each, a random site of 39 is seldom the best one of its block."""
    options = PlanningOptions(brief=True, private_reasoning=True)
    texts, scores = dict[float, list[list[str]]](), dict[float, float]()
    for stray in (0.0, 0.5, 1.0):
        agent = f"searcher:think=points,plans=2,stray={stray}"
        games = [
            played(instance, "teller:rounds=1,score=total", agent, options, seed=i)
            for i, instance in enumerate(CITIES)
        ]
        texts[stray] = [[a.text for a in game.view(1).log if a.seat == 1] for game in games]
        scores[stray] = statistics.fmean(game.outcome().score_norm for game in games)
    assert scores[0.0] > scores[0.5] + 0.05 > scores[1.0] + 0.15
    same = {
        stray: sum(a[:2] == b[:2] for a, b in zip(texts[0.0], texts[stray], strict=True))
        for stray in texts
    }
    assert same[1.0] < 6 < same[0.5] < 35
    for sure, strayed in zip(texts[0.0], texts[1.0], strict=True):
        assert sure[0] == strayed[0]  # the search
        looked_up = strayed[1].split("distance_to(")[1].split(")")[0]
        assert strayed[2].split(", ")[1] == looked_up  # a plan is around the site looked up


def test_an_agent_that_thinks_needs_room_for_it() -> None:
    thinker = make_scripted("searcher:think=points", seed=0)
    plain = play(new_game(), (0, "[message] check out live music!"))
    with pytest.raises(ValueError, match="needs a game with private_reasoning"):
        thinker.act(plain.view(1))


def test_without_messages_a_user_rejects_plans_below_zero_up_to_its_rounds() -> None:
    game = PlanningGame(HAND, SILENT)
    user, agent = make_scripted("teller:rounds=9", seed=1), make_scripted("guesser", seed=2)
    while (seat := game.seat_to_move) is not None:
        game.step(seat, (user, agent)[seat].act(game.view(seat)))
    totals = [sheet.total for sheet in game.view(0).sheets]
    assert all(total < 0 for total in totals[:-1]) and (totals[-1] >= 0 or len(totals) == 10)


def test_a_fact_beside_a_site_that_the_city_lacks_is_no_sites() -> None:
    said = "[message] Saul's: price 20.0, the zoo price 6. Zoo: price 7; The Mall: category shop"
    game = play(new_game(), (0, "[message] ok"), (1, said))
    agent = game.measures((1,))
    assert (agent["true_statements"], agent["statements"]) == (2, 2)


def test_what_is_stated_falsely_is_counted() -> None:
    game = play(
        new_game(),
        (0, "[message] check out live music!; keep budget below $90"),  # the budget is 40
        (1, "[message] Saul's: price 20.0, has parking False. The Mall: category shop, price 6"),
        (0, "[message] ok"),
        (1, "[propose] [Saul's, The Dive, Atlas Park]"),
        (0, "[reject]"),
        (0, "[message] Saul's: 4; The Dive: 9; travel: -13; total: -10"),
    )
    user, agent = game.measures((0,)), game.measures((1,))
    assert (user["true_statements"], user["statements"]) == (1 + 3, 2 + 4)
    assert (agent["true_statements"], agent["statements"]) == (2, 4)
    assert user["proposals"] == 0 and agent["proposals"] == 1 and agent["words"] == 12


@pytest.mark.parametrize(
    "text",
    [
        *("I do not don't like hipster places", "I don't  like hipster places", "not: like: jazz"),
        *("dont like hipster places", "I never like hipster places", "unlike like hipster places"),
        *("It is wrong that I check out live music!", "I cannot keep budget below $40"),
        *("keep budget below $40k", "keep budget below $40.50", "keep budget below $40,000"),
    ],
)
def test_a_denied_preference_or_another_number_is_not_stated(text: str) -> None:
    assert stated_in(text) == []
    assert len(stated_in(f"No, never! {WISHES}")) == 2


WISHES = "If you could, go to at least one shop, don't like hipster places"


@pytest.mark.parametrize(
    ("fact", "true", "stated"),
    [
        *(("price 20", 1, 1), ("price $20", 1, 1), ("price 20.0.", 1, 1)),
        *(("has parking True", 1, 1), ("price 2_0", 0, 1), ("price ٢٠", 1, 1), ("price 2e1", 0, 1)),
        *(("has parking $True", 0, 1), ("price 20%", 0, 0), ("price 20/25", 0, 0)),
        *(("price 20,000", 0, 0), ("price 20-25", 0, 0), ("not price 20", 0, 0)),
        *(("isn’t price 20", 0, 0), ("price 20 or 30", 0, 0)),
    ],
)
def test_a_fact_is_its_own_value(fact: str, true: int, stated: int) -> None:
    game = play(new_game(), (0, "[message] ok"), (1, f"[message] Saul's: {fact}"))
    measured = game.measures((1,))
    assert (measured["true_statements"], measured["statements"]) == (true, stated)


def test_scores_stated_about_a_plan_of_the_opening_are_counted() -> None:
    told = (0, "[message] Saul's: 4; The Dive: 9; travel: -13; total: -10")
    plain = play(new_game(), (0, "[message] Hi!"), (1, PLAN), (0, "[reject]"), told)
    begun = replace(HAND, opening=tuple(plain.view(1).log[:3]))
    game = play(new_game(begun), told)
    for measure in ("statements", "true_statements"):
        assert game.measures((0,))[measure] == plain.measures((0,))[measure] > 0


def test_recorded_games_give_peoples_figures() -> None:
    path = human_games("planning")
    games, records = load_kit("planning").read_recorded(path), list(read_records(path))
    tallies = [recorded_tally(r, game.board) for r, game in zip(records, games, strict=True)]
    assert len(games) == 57 and all(t["agreement"] == 1 for t in tallies)
    assert statistics.fmean(t["score"] for t in tallies) == pytest.approx(0.879, abs=0.001)
    # An acceptance without a proposal agrees on nothing.
    accepts = {**records[0], "action_log": records[0]["action_log"][-1:]}
    tally = recorded_tally(accepts, games[0].board)
    assert (tally["score"], tally["agreement"], tally["turns"]) == (0.0, 0.0, 1.0)
