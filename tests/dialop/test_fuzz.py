"""No text makes the game raise, and a refused text changes only the error count."""

from __future__ import annotations

import json

from dialop_boards import BEST, SCALED, SMALL, WORST
from game_checks import comparable
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dialop.logged import Rules
from dialop.matching.game import MatchingGame, MatchingInstance
from dialop.matching.statements import count_true, stated_cells

TAGS = ["[message]", "[propose]", "[accept]", "[reject]", "[Propose]", "[think]", "[", "]"]
NAMES = ["Proposal:", "BLEU", "Electra", "Ava", "Daniel", "Ava Li", "nguyen", BEST, WORST]
BETWEEN = [": ", ":", "\n", "<br/>", "- ", "1. ", "**", ", ", " and ", " is ", "3", "87", "?"]
ODD = [
    "</think>",
    "none",
    "&emsp;",
    "&#0;",
    "&#x110000;",
    "9" * 50,
    "\u017f",
    "\u0130",
    "\u2028",
    "\ud800",
    "\x00",
]
PIECES = st.sampled_from([*TAGS, *NAMES, *BETWEEN, *ODD])
TEXTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=14).map("".join))
OPTIONS = st.builds(
    Rules, messages=st.booleans(), brief=st.booleans(), private_reasoning=st.booleans()
)


@given(OPTIONS, st.sampled_from([SMALL, SCALED]), st.lists(st.tuples(st.integers(0, 1), TEXTS)))
@example(Rules(), SMALL, [(0, "[message] \u017fofia \u0130 BLEU 3")])
@hypothesis_settings(max_examples=200)
def test_no_text_raises_and_refusals_change_nothing(
    options: Rules, instance: MatchingInstance, moves: list[tuple[int, str]]
) -> None:
    game = MatchingGame(instance, options)
    for seat, text in moves:
        before, errors = comparable(game.state()), game.num_errors
        step = game.step(seat, text)
        if step.error is None:
            assert step.action and len(game.view(0).log) == len(before["play"]["log"]) + 1
            assert game.num_errors == errors
        else:
            assert step.action is None and step.error_kind and step.observations == ("", "")
            assert comparable(game.state()) == before
            assert sum(game.num_errors) == sum(errors) + 1
        state = json.loads(json.dumps(game.state()))
        restored = MatchingGame.from_state(state)
        assert restored.state() == state and restored.seat_to_move == game.seat_to_move
        for each in (0, 1):
            assert game.prompt(each).user and restored.prompt(each).user
            assert restored.view(each) == game.view(each)


@given(TEXTS)
@example("\u017fAva BLEU 3, \u0130va BLEU " + "9" * 6000)
def test_reading_statements_never_raises(text: str) -> None:
    view = MatchingGame(SMALL, Rules()).view(0)
    cells = stated_cells(text, view)
    assert all(0 <= r < 2 and 0 <= p < 2 and 0 <= v < 10**6 for r, p, v in cells)
    num_true, num_stated = count_true(view, text)
    assert 0 <= num_true <= num_stated == len(cells)
