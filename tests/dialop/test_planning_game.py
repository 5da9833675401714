"""The rules of city planning: a golden game, turns, refusals, and what each seat may know."""

from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from dialop.kit import load_kit
from dialop.planning.board import PlanningInstance, PlanningOptions
from dialop.planning.game import PlanningGame
from dialop.planning.generate import PlanningRecipe
from dialop.planning.score import all_totals, sheet_of
from tests.helpers.dialop_boards import play
from tests.helpers.planning_cities import (
    BEST,
    BRIEF,
    FULL,
    HAND,
    ONE,
    PLAN,
    PREFERENCES,
    SILENT,
    SITES,
    new_game,
)

generate = load_kit("planning").generate

HELLO = (0, "[message] I like live music.")
LOOK = (1, "[tool] Search(fields=[live music, price])")
SKETCH = (1, "[propose] [The Dive, NULL, NULL]")
PLAN_OF_NAMES = "Saul's, The Dive, Atlas Park"


def test_the_score_of_a_plan_by_hand() -> None:
    sheet = sheet_of(SITES, PREFERENCES, (0, 1, 2))
    # Saul's has parking (+4). The Dive has none (-4) but live music (+5).
    assert sheet.sites == (4, 1, 0)
    # 0.5 and 4.5 miles at 3 points a mile: 1.5 and 13.5, rounded towards 0.
    assert sheet.legs == (-1, -13)
    # 20 + 30 + 0 dollars are above 40; the park and a bar are in the plan.
    assert [points for _, points in sheet.checklist] == [-6, 3, 2]
    assert sheet.total == -10
    assert (HAND.best, HAND.worst) == (-6, -27)
    assert HAND.norm(-10) == pytest.approx(17 / 21)


def test_a_golden_game() -> None:
    game = new_game()
    assert game.prompt(0).user.startswith("Your preferences:\n- renting a car")
    assert "Saul's, The Dive, Atlas Park, The Mall" in game.prompt(1).system
    assert game.step(*HELLO).observations == ("", "User: [message] I like live music.")
    found = game.step(1, '[tool] Search(text_query="live music", fields=[price])')
    # The Mall's live music is False, so the text query must not find it.
    assert found.observations == ("", "Search results (1):\nname|price\nThe Dive|price 30")
    assert game.seat_to_move == 1
    shown = game.step(1, "[propose] [sauls, the dive, Atlas  Parc]").observations[0]
    assert shown.splitlines() == [
        "Agent: [propose] [Saul's, The Dive, Atlas Park]",
        "Score sheet:",
        "1. Saul's: 4 (restaurant, $20, has parking True, touristy False)",
        "Travel 0.5 miles: -1",
        "2. The Dive: 1 (bar, $30, has parking False, live music True)",
        "Travel 4.5 miles: -13",
        "3. Atlas Park: 0 (park, $0, touristy True, rating 4.5)",
        "NO keep budget below $40: -6",
        "YES definitely want to go to Atlas Park: 3",
        "YES go to at least one bar: 2",
        "Total: -10",
        "You can only answer [accept] or [reject].",
    ]
    assert game.answer_due and game.seat_to_move == 0
    assert game.step(0, "[reject]").observations == (
        "You rejected the plan. It is your move again.",
        "User: [reject]",
    )
    play(game, (0, "[message] The park is too far."), (1, BEST), (0, "[accept]"))
    outcome = game.outcome()
    assert (outcome.over, outcome.agreed, outcome.score) == (True, True, -6.0)
    assert outcome.rewards == (1.0, 1.0) and outcome.score_norm == outcome.proposal_norm == 1.0
    assert (outcome.facts["best"], outcome.facts["worst"]) == (-6.0, -27.0)
    assert outcome.facts["random"] == pytest.approx((27 - 46 / 3) / 21)


def test_a_sketch_needs_a_message_and_no_answer() -> None:
    game = play(new_game(), HELLO, SKETCH)
    assert game.seat_to_move == 0 and not game.answer_due
    assert game.step(0, "[accept]").error_kind == "nothing_pending"
    sheet = game.view(0).sheets[0]
    assert sheet.sites == (1, 0, 0) and sheet.legs == (0, 0)
    assert [points for _, points in sheet.checklist] == [0, -3, 2]
    play(game, (0, "[message] Go on."), (1, BEST))
    assert game.answer_due


def test_controls_refuse_what_they_turn_off() -> None:
    game = new_game(options=SILENT)
    assert game.seat_to_move == 1
    assert game.step(1, "[message] hi").error_kind == "no_messages"
    assert game.step(1, "[propose] [The Dive, NULL, NULL]").error_kind == "bad_proposal"
    assert play(game, (1, PLAN), (0, "[reject]")).seat_to_move == 1
    blind = play(new_game(options=PlanningOptions(search=False)), HELLO)
    assert blind.step(*LOOK).error_kind == "no_search"
    assert "Search(" not in blind.prompt(1).system and "Search(" in new_game().prompt(1).system


def test_each_seat_knows_only_its_own_texts() -> None:
    game = play(new_game(), HELLO, LOOK, (1, PLAN))
    user, agent = game.view(0), game.view(1)
    assert user.preferences == tuple(p.text for p in PREFERENCES) and user.names == ()
    assert [action.kind for action in user.log] == ["message", "propose"]
    assert agent.preferences == () and agent.sheets == () and agent.names == HAND.names
    assert [action.kind for action in agent.log] == ["message", "tool", "propose"]
    assert agent.log[1].result.startswith("Search results (4):")
    restored = PlanningGame.from_state(game.state())
    assert "Search" not in restored.prompt(0).user and "Total" not in restored.prompt(1).user
    # Nothing of the city or of the weights is in the opening texts.
    for options in (FULL, BRIEF):
        fresh = new_game(options=options)
        other = replace(
            HAND,
            preferences=tuple(replace(p, weight=9) for p in PREFERENCES),
            sites=tuple(replace(s, price=7, at=(1.0, 1.0), features={}) for s in SITES),
        )
        for seat in (0, 1):
            assert fresh.prompt(seat) == new_game(other, options).prompt(seat)
            assert fresh.view(seat) == new_game(other, options).view(seat)


def test_one_slot_has_no_travel() -> None:
    game = play(new_game(ONE), HELLO, (1, "[propose] [Saul's]"))
    assert game.answer_due and game.view(0).sheets[0].legs == ()
    assert play(game, (0, "[accept]")).outcome().score_norm == 1.0


def naive_total(instance: PlanningInstance, plan: tuple[int, ...]) -> int:
    """The total, written down a second time from the rules."""
    sites, total = [instance.sites[i] for i in plan], 0
    for p in instance.preferences:
        if p.kind == "feature":
            for site in sites:
                value = site.features.get(p.name)
                total += p.weight if value in p.liked else -p.weight if value in p.disliked else 0
        elif p.kind == "distance":
            for a, b in pairwise(sites):
                miles = round(((a.at[0] - b.at[0]) ** 2 + (a.at[1] - b.at[1]) ** 2) ** 0.5, 1)
                total += int(-p.weight * miles)
        elif p.kind == "budget":
            total -= p.weight if sum(site.price for site in sites) > p.budget else 0
        elif any(s.name in p.sites or s.category == p.name for s in sites):
            total += p.weight
        elif p.penalised:
            total -= p.weight
    return total


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_legal_plan_beats_the_best_or_is_below_the_worst(slots: int) -> None:
    recipe = PlanningRecipe(sites=9, slots=slots)
    for instance in generate(recipe, seed=3, num=15):
        plans = list(permutations(range(9), slots))
        totals = [naive_total(instance, plan) for plan in plans]
        assert (max(totals), min(totals)) == (instance.best, instance.worst)
        assert instance.mean == pytest.approx(sum(totals) / len(totals))
        table = all_totals(instance.sites, instance.preferences, slots=slots)
        for plan, total in zip(plans, totals, strict=True):
            assert table[plan] == total
        sheets = [sheet_of(instance.sites, instance.preferences, plan) for plan in plans[:40]]
        assert [sheet.total for sheet in sheets] == totals[:40]


def test_brackets_may_be_missing_but_not_all_names() -> None:
    """As docs/planning.md says."""
    for text in (
        f"[{PLAN_OF_NAMES}]",
        PLAN_OF_NAMES,
        f"How about [{PLAN_OF_NAMES}]?",
        f"[{PLAN_OF_NAMES}",
    ):
        assert play(new_game(), HELLO, (1, f"[propose] {text}")).view(1).log[-1].plan == (0, 1, 2)
    for text in ("[NULL, NULL, NULL]", "null, Null, NULL", "[null,null,null] please"):
        step = play(new_game(), HELLO).step(1, f"[propose] {text}")
        assert step.error_kind == "bad_proposal" and "every slot is empty" in (step.error or "")
