"""What every game promises: legal play, refusals, clones, states; no text makes it raise."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dialop.checks import Case, Played, check_plays
from dialop.kit import load_kit
from tests.helpers.dialop_boards import play
from tests.helpers.hand_games import (
    BEST,
    BEST_PLAN,
    HAND_GAMES,
    ODD,
    PLAN,
    TAGS,
    Moves,
    comparable,
    trip,
)

every_game = pytest.mark.parametrize("name", HAND_GAMES)


@every_game
@pytest.mark.parametrize(("brief", "messages"), [(False, True), (True, False)])
def test_a_game_is_played_to_its_end(name: str, brief: bool, messages: bool) -> None:
    """The checks that ship (dialop/checks.py), on a game by hand instead of scripted players."""
    hand, kit = HAND_GAMES[name], load_kit(HAND_GAMES[name].kind.name)
    moves = list(hand.moves)
    if messages or name.startswith("collab"):  # which has no other moves
        options = kit.Options(brief=brief)
    else:  # a sketch of a plan needs a message as its answer
        options = kit.Options(brief=brief, messages=False)
        moves = [(s, t) for s, t in moves if "[message]" not in t and "NULL" not in t]
    case = Case(kit, options, (hand.instance,), (Played(hand.instance, tuple(moves), True),))
    results = check_plays(case, ("play", "clone", "refusals", "outcome", "state"))
    assert [result.problem for result in results] == [""] * 5
    game = play(kit.new_game(hand.instance, options), *moves)
    assert game.seat_to_move is None and game.outcome().over
    assert all(game.step(seat, "[accept]").error_kind == "over" for seat in range(game.num_seats))


@every_game
def test_no_other_state_and_no_other_seat_is_taken(name: str) -> None:
    hand = HAND_GAMES[name]
    game = hand.new()
    with pytest.raises(ValueError, match=f"must be \"{hand.kind.name}\", got 'chess'"):
        hand.kind.from_state({**game.state(), "game": "chess"})
    for seat in (-1, game.num_seats):
        for ask in (game.prompt, game.view, lambda seat: game.step(seat, "[accept]")):
            with pytest.raises(ValueError, match=f"seat must be 0 to {game.num_seats - 1}, got"):
                ask(seat)


SETTINGS = ("messages", "brief", "private_reasoning", "search")


@every_game
@given(data=st.data())
@example(data=None)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_text_raises_and_refusals_change_nothing(name: str, data: Any) -> None:
    hand = HAND_GAMES[name]
    pieces = st.sampled_from([*TAGS, *ODD, *hand.pieces])
    texts = st.one_of(st.text(max_size=60), st.lists(pieces, max_size=14).map("".join))
    seats = st.integers(0, hand.new().num_seats - 1)
    moves = st.lists(st.one_of(st.tuples(seats, texts), st.sampled_from(hand.moves)), max_size=12)
    own = [each.name for each in fields(hand.options) if each.name in SETTINGS]
    changes = {} if data is None else {each: data.draw(st.booleans()) for each in own}
    game = hand.new(**changes)
    for seat, text in ODD_MOVES if data is None else data.draw(moves):
        before, errors, mover = comparable(game.state()), game.num_errors, game.seat_to_move
        step = game.step(seat, text)
        if step.error is None:
            assert step.action and seat == mover and game.num_errors == errors
            assert len(game.state()["play"]["log"]) == len(before["play"]["log"]) + 1
        else:
            assert step.action is None and step.error_kind and not any(step.observations)
            assert "\n" not in step.error and comparable(game.state()) == before
            assert sum(game.num_errors) == sum(errors) + 1
        assert 0 <= game.outcome().score_norm <= 1
        state = json.loads(json.dumps(game.state()))
        restored = hand.kind.from_state(state)
        assert restored.state() == state and restored.seat_to_move == game.seat_to_move
        for each in range(game.num_seats):
            assert game.prompt(each).user and restored.prompt(each).user
            assert restored.view(each) == game.view(each)


# Texts that once made a game raise.
ODD_MOVES: Moves = [
    *((0, "[message] \u017fofia \u0130 BLEU 3"), (1, "[answer] \\boxed{\\frac{1}{0}}")),
    *((0, "[message] \ud800"), (1, "[message] x"), (1, "[tool] Search(limit=²)")),
    *((1, "[tool] Search(filters=[price<1e999])"), (0, "0: [message] \u2028[accept]")),
]

HELLO, SKETCH = (0, "[message] hi"), (1, "[propose] [The Dive, NULL, NULL]")
OPENING: Moves = [(0, "[message] Morning, please."), (1, "[message] Anything.")]
ENDED: Moves = [(0, BEST), (1, "[accept]")]
ASKED = (2, trip(0, 0))


@pytest.mark.parametrize(
    ("name", "moves", "seat", "text", "kind"),
    [
        ("matching", [], 0, "Ava BLEU 3", "no_tag"),
        ("matching", [], 0, "so: [message] hi", "no_tag"),
        ("matching", [], 0, "[think] hm", "unknown_tag"),
        ("matching", [], 0, "[] hm", "unknown_tag"),
        ("matching", [], 0, "[message]  \n ", "empty"),
        ("matching", [], 0, "[propose]", "empty"),
        ("matching", [], 0, "[reject] no", "nothing_pending"),
        ("matching", [], 0, "[propose] BLEU: Ava", "bad_proposal"),
        ("matching", [], 1, "[message] hi", "not_your_turn"),
        ("matching", [(0, BEST)], 1, "[message] hi", "must_answer"),
        ("matching", [(0, BEST)], 1, BEST, "must_answer"),
        ("matching", [(0, BEST)], 1, "[think] hm", "must_answer"),
        ("matching", [(0, BEST)], 1, "no", "no_tag"),
        ("matching", ENDED, 0, "[accept]", "over"),
        ("planning", [], 1, "[message] hi", "not_your_turn"),
        ("planning", [], 0, "hi", "no_tag"),
        ("planning", [], 0, "[think] hm", "unknown_tag"),
        ("planning", [], 0, "[message]", "empty"),
        ("planning", [], 0, PLAN, "not_yours"),
        ("planning", [], 0, "[tool] Search()", "not_yours"),
        ("planning", [], 0, "[accept]", "nothing_pending"),
        ("planning", [HELLO], 1, "[accept]", "not_yours"),
        ("planning", [HELLO], 1, "[tool] Search(", "bad_query"),
        ("planning", [HELLO], 1, "[propose] [The Mall, The Mall, The Dive]", "bad_proposal"),
        ("planning", [HELLO], 1, "[propose] [The Mall, The Dive]", "bad_proposal"),
        ("planning", [HELLO], 1, "[propose] [NULL, NULL, NULL]", "bad_proposal"),
        ("planning", [HELLO], 1, "[propose] [The Moon, The Dive, NULL]", "bad_proposal"),
        ("planning", [HELLO, SKETCH], 0, "[accept]", "nothing_pending"),
        ("planning", [HELLO, (1, PLAN)], 0, "[message] hm", "must_answer"),
        ("planning", [HELLO, (1, BEST_PLAN), (0, "[accept]")], 0, "[message] hm", "over"),
        ("mediation", [], 0, "hello", "no_tag"),
        ("mediation", [], 0, "[dance]", "unknown_tag"),
        ("mediation", [], 0, "[message]", "empty"),
        ("mediation", [], 0, "[accept]", "nothing_pending"),
        ("mediation", [], 0, trip(0, 0)[5:], "only_agent"),
        ("mediation", [], 2, trip(0, 0), "not_your_turn"),
        ("mediation", OPENING, 0, "[message] more", "not_your_turn"),
        ("mediation", OPENING, 2, "[message] hi", "no_recipient"),
        ("mediation", OPENING, 2, "all: [message] hi", "bad_recipient"),
        ("mediation", OPENING, 2, f"0: {trip(0, 0)[5:]}", "bad_recipient"),
        ("mediation", OPENING, 2, "2: [message] hi", "no_tag"),
        ("mediation", OPENING, 2, "all: [accept]", "only_users"),
        ("mediation", [*OPENING, ASKED], 0, "[message] hm", "must_answer"),
        ("mediation", [*OPENING, ASKED], 1, "[accept]", "not_your_turn"),
        ("mediation", [*OPENING, ASKED, (0, "[accept]")], 0, "[reject]", "not_your_turn"),
        ("mediation", [*OPENING, ASKED, (0, "[accept]"), (1, "[accept]")], 2, "x", "over"),
        ("collab", [], 1, "[end]", "not_yours"),
        ("collab", [], 1, "[answer]", "empty"),
        ("collab", [], 0, "hi", "not_your_turn"),
        ("collab", [(1, "What number?")], 0, "[answer] 8", "not_yours"),
        ("collab", [(1, "What number?")], 0, "It is 8.", "solved"),
        ("collab", [(1, "[answer] 8")], 0, "hi", "over"),
    ],
)
def test_a_refused_move_names_its_rule_and_counts_in_its_turn_alone(
    name: str, moves: Moves, seat: int, text: str, kind: str
) -> None:
    game = play(HAND_GAMES[name].new(), *moves)
    before, outcome, mover = comparable(game.state()), game.outcome(), game.seat_to_move
    for count in (1, 2):
        step = game.step(seat, text)
        assert (step.action, step.error_kind) == (None, kind) and not any(step.observations)
        assert step.error is not None and step.error.startswith("Error: ")
        assert sum(game.num_errors) == game.num_errors[seat] == count
        assert game.view(seat).num_errors_this_turn == (count if seat == mover else 0)
    assert comparable(game.state()) == before and game.outcome() == outcome
    others = [each for each in range(game.num_seats) if each != seat]
    assert all(game.view(each).num_errors_this_turn == 0 for each in others)


@pytest.mark.parametrize("name", ["collab", "matching", "mediation", "planning"])
@pytest.mark.parametrize("brief", [False, True])
def test_scripted_players_move_on_their_turn_alone_and_repair_their_slips(
    name: str, brief: bool
) -> None:
    """A player is a function of its seed and its view. With slip=1 each of its moves is malformed
    at first; a user of collab has no slips."""
    hand, kit = HAND_GAMES[name], load_kit(name)
    for spec in kit.BASELINES:
        game, num_moves = hand.new(brief=brief), 0
        players = [
            kit.make_script(each if each == "user" else f"{each}:slip=1", seed=seat)
            for seat, each in enumerate(kit.seated(spec))
        ]
        while (seat := game.seat_to_move) is not None:
            for other in {*range(game.num_seats)} - {seat}:
                with pytest.raises(ValueError, match=r"not to move|plays seat"):
                    players[other].act(game.view(other))
            text = players[seat].act(game.view(seat))
            assert text == players[seat].lesson(game.clone().view(seat)).text
            if players[seat].slip:
                assert game.step(seat, text).error is not None
                text = players[seat].act(game.view(seat))
            assert game.step(seat, text).error is None
            num_moves += 1
        assert num_moves > (spec != "guess") and players[0].reseeded(9).seed == 9


# A wrong spec of a scripted player, and the name or the choices that the refusal must hold.
WRONG_SPECS = {
    "collab": {
        "honest": "user, ask, guess",
        "ask:patience=1": "patience",
        "user:patience=no": "patience",
    },
    "mediation": {
        "solo:stray=0.5": "needs think=values",
        "honset": "honest",
        "honest:tell=all": "costs, top, calendar",
        "honest:probe=1.5": "probe must be an integer",
    },
    "matching": {
        "honset": "random, solo, honest; nearest is honest",
        "solo:tell=all": "think, trials, stray",
        "honest:tel=all": "nearest is tell",
        "solo:think=levels,stray=0.1": "stray",
        "solo:think=levels,trials=2": "trials",
        "random:think=levels": "no, trial",
        "honest:plan=own,think=swaps": "swaps",
        "random:slip=often": "slip .*'often'",
    },
    "planning": {
        "silent:tell=all": "tell",
        "searcher:by=filter,think=points": "by=table",
        "searcher:plans=2": "needs think=points",
        "searcher:stray=0.5": "needs think=points",
        "teller:rounds=-1": "0 to 20",
    },
}


@pytest.mark.parametrize("name", WRONG_SPECS)
def test_a_wrong_spec_names_the_right_ones(name: str) -> None:
    for spec, named in WRONG_SPECS[name].items():
        with pytest.raises(ValueError, match=named):
            load_kit(name).make_script(spec, seed=0)
