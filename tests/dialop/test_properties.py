"""What every game promises: legal play, refusals, clones, states; no text makes it raise."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from dialop_boards import play
from hand_games import BEST, BEST_PLAN, HAND_GAMES, ODD, PLAN, TAGS, Moves, comparable, trip
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dialop.checks import Case, Played, check_plays
from dialop.kit import load_kit

every_game = pytest.mark.parametrize("name", HAND_GAMES)


@every_game
@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("messages", [True, False])
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
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
USE, START = "use [message] or [propose]", "line 1 has no tag; start with [message] or [propose]"


@pytest.mark.parametrize(
    ("name", "moves", "seat", "text", "kind", "said"),
    [
        ("matching", [], 0, "Ava BLEU 3", "no_tag", START),
        ("matching", [], 0, "so: [message] hi", "no_tag", START),
        ("matching", [], 0, "[think] hm", "unknown_tag", f"unknown tag [think]; {USE}"),
        ("matching", [], 0, "[] hm", "unknown_tag", f"unknown tag []; {USE}"),
        ("matching", [], 0, "[message]  \n ", "empty", "nothing after [message]"),
        ("matching", [], 0, "[propose]", "empty", "nothing after [propose]"),
        ("matching", [], 0, "[accept]", "nothing_pending", f"no proposal to accept; {USE}"),
        ("matching", [], 0, "[reject] no", "nothing_pending", f"no proposal to reject; {USE}"),
        ("matching", [], 0, "[propose] BLEU: Ava", "bad_proposal", "line 2 is missing; 2 lines"),
        ("matching", [], 1, "[message] hi", "not_your_turn", "it is your partner's turn"),
        ("matching", [(0, BEST)], 1, "[message] hi", "must_answer", "answer the proposal first:"),
        ("matching", [(0, BEST)], 1, BEST, "must_answer", "answer the proposal first: [accept]"),
        ("matching", [(0, BEST)], 1, "[think] hm", "must_answer", "answer the proposal first:"),
        ("matching", [(0, BEST)], 1, "no", "no_tag", "line 1 has no tag; start with [accept]"),
        ("matching", [(0, BEST), (1, "[accept]")], 0, "[accept]", "over", "the game is over"),
        ("matching", [(0, BEST), (1, "[accept]")], 1, "[message] x", "over", "the game is over"),
        ("planning", [], 1, "[message] hi", "not_your_turn", "it is the other's turn"),
        ("planning", [], 0, "hi", "no_tag", ""),
        ("planning", [], 0, "[think] hm", "unknown_tag", ""),
        ("planning", [], 0, "[message]", "empty", ""),
        ("planning", [], 0, PLAN, "not_yours", ""),
        ("planning", [], 0, "[tool] Search()", "not_yours", ""),
        ("planning", [], 0, "[accept]", "nothing_pending", ""),
        ("planning", [HELLO], 1, "[accept]", "not_yours", ""),
        ("planning", [HELLO], 1, "[tool] Search(", "bad_query", ""),
        ("planning", [HELLO], 1, "[propose] [The Mall, The Mall, The Dive]", "bad_proposal", ""),
        ("planning", [HELLO], 1, "[propose] [The Mall, The Dive]", "bad_proposal", ""),
        ("planning", [HELLO], 1, "[propose] [NULL, NULL, NULL]", "bad_proposal", ""),
        ("planning", [HELLO], 1, "[propose] [The Moon, The Dive, NULL]", "bad_proposal", ""),
        ("planning", [HELLO, SKETCH], 0, "[accept]", "nothing_pending", ""),
        ("planning", [HELLO, (1, PLAN)], 0, "[message] hm", "must_answer", ""),
        ("planning", [HELLO, (1, BEST_PLAN), (0, "[accept]")], 0, "[message] hm", "over", ""),
        ("mediation", [], 0, "hello", "no_tag", ""),
        ("mediation", [], 0, "[dance]", "unknown_tag", ""),
        ("mediation", [], 0, "[message]", "empty", ""),
        ("mediation", [], 0, "[accept]", "nothing_pending", ""),
        ("mediation", [], 0, trip(0, 0)[5:], "only_agent", ""),
        ("mediation", [], 1, "[message] hi", "not_your_turn", "it is not your turn"),
        ("mediation", [], 2, trip(0, 0), "not_your_turn", ""),
        ("mediation", OPENING, 0, "[message] more", "not_your_turn", ""),
        ("mediation", OPENING, 2, "[message] hi", "no_recipient", ""),
        ("mediation", OPENING, 2, trip(0, 0)[5:], "no_recipient", ""),
        ("mediation", OPENING, 2, "all: [message] hi", "bad_recipient", ""),
        ("mediation", OPENING, 2, f"0: {trip(0, 0)[5:]}", "bad_recipient", ""),
        ("mediation", OPENING, 2, "2: [message] hi", "no_tag", ""),
        ("mediation", OPENING, 2, "all: [accept]", "only_users", ""),
        ("mediation", OPENING, 2, "0: [message] ", "empty", ""),
        ("mediation", OPENING, 2, "hello", "no_tag", ""),
        ("mediation", [*OPENING, (2, trip(0, 0))], 0, "[message] hm", "must_answer", ""),
        ("mediation", [*OPENING, (2, trip(0, 0))], 1, "[accept]", "not_your_turn", ""),
        (
            "mediation",
            [*OPENING, (2, trip(0, 0)), (0, "[accept]")],
            *(0, "[reject]", "not_your_turn", ""),
        ),
        (
            "mediation",
            [*OPENING, (2, trip(0, 0)), (0, "[accept]"), (1, "[accept]")],
            *(2, "x", "over", ""),
        ),
        ("collab", [], 1, "[end]", "not_yours", ""),
        ("collab", [], 1, "[answer]", "empty", ""),
        ("collab", [], 0, "hi", "not_your_turn", "it is the other's turn"),
        ("collab", [(1, "What number?")], 0, "[answer] 8", "not_yours", ""),
        ("collab", [(1, "[answer] 8")], 0, "hi", "over", "the conversation is over"),
    ],
)
def test_a_refused_move_names_its_rule_and_counts_in_its_turn_alone(
    name: str, moves: Moves, seat: int, text: str, kind: str, said: str
) -> None:
    game = play(HAND_GAMES[name].new(), *moves)
    before, outcome, mover = comparable(game.state()), game.outcome(), game.seat_to_move
    for count in (1, 2):
        step = game.step(seat, text)
        assert (step.action, step.error_kind) == (None, kind) and not any(step.observations)
        assert step.error is not None and step.error.startswith(f"Error: {said}")
        assert sum(game.num_errors) == game.num_errors[seat] == count
        assert game.view(seat).num_errors_this_turn == (count if seat == mover else 0)
    assert comparable(game.state()) == before and game.outcome() == outcome
    others = [each for each in range(game.num_seats) if each != seat]
    assert all(game.view(each).num_errors_this_turn == 0 for each in others)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("collab", "honest", "unknown scripted player 'honest': choose one of user, ask, guess"),
        ("collab", "asks", "nearest is ask"),
        ("collab", "ask:eager=1", "unknown option of ask 'eager': choose one of slip"),
        ("collab", "user:eager=2", "eager must be a number from 0 to 1, got '2'"),
        ("collab", "user:patience=no", "patience must be a number from 1 to 1000"),
        ("mediation", "honset", "unknown scripted player 'honset'.*nearest is honest"),
        ("mediation", "random:probe=1", "unknown option of random 'probe'"),
        ("mediation", "honest:tell=all", "unknown tell 'all': choose one of costs, top, calendar"),
        ("mediation", "honest:probe=1.5", "probe must be a whole number from 0 to 9, got '1.5'"),
        ("mediation", "honest:slip=2", "slip must be a number from 0 to 1, got '2'"),
        (
            "matching",
            "solo:think=all",
            "unknown think 'all': choose one of no, levels, trial, swaps",
        ),
        (
            "matching",
            "solo:think=levels,stray=0.1",
            "stray needs think=trial or .*got think=levels",
        ),
        ("matching", "solo:think=levels,trials=2", "trials needs think=trial.*got think=levels"),
        (
            "matching",
            "solo:think=trial,trials=1.5",
            "trials must be a whole number from 1 to 8, got '1.5'",
        ),
        ("matching", "solo:think=trial,trials=9", "trials must be a number from 1 to 8, got '9'"),
        ("matching", "random:think=levels", "unknown think 'levels': choose one of no, trial"),
        (
            "matching",
            "honset",
            "unknown scripted player 'honset'.*random, solo, honest; nearest is honest",
        ),
        ("matching", "", "unknown scripted player ''.*random, solo, honest"),
        (
            "matching",
            "solo:tell=all",
            "unknown option of solo 'tell': choose one of think, trials, stray",
        ),
        ("matching", "honest:tel=all", "unknown option of honest 'tel'.*nearest is tell"),
        ("matching", "honest:tell=most", "unknown tell 'most': choose one of all, top, rows"),
        ("matching", "honest:plan=all", "unknown plan 'all': choose one of pooled, own, random"),
        (
            "matching",
            "honest:plan=own,think=swaps",
            "plan=own needs think=no, levels or trial.*swaps",
        ),
        ("matching", "honest:reply=", "unknown reply '': choose one of propose, tell"),
        ("matching", "random:slip=2", "slip must be a number from 0 to 1"),
        ("matching", "random:slip=often", "slip must be a number from 0 to 1, got 'often'"),
        ("planning", "planner", "unknown scripted player 'planner'"),
        ("planning", "silent:tell=all", "unknown option of silent 'tell'"),
        ("planning", "teller:tell=al", "nearest is all"),
        ("planning", "searcher:by=map", "unknown by 'map'"),
        ("planning", "teller:rounds=0.5", "rounds must be a whole number"),
        ("planning", "searcher:legs=0.5", "legs must be a whole number"),
        ("planning", "searcher:think=point", "nearest is points"),
        ("planning", "searcher:by=filter,think=points", "think=points needs by=table"),
        ("planning", "teller:rounds=-1", "rounds must be a number from 0 to 20"),
        ("planning", "guesser:slip=2", "slip must be a number from 0 to 1"),
    ],
)
def test_a_wrong_spec_names_the_right_ones(name: str, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_kit(name).make_script(spec, seed=0)
