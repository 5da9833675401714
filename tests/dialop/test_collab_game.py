"""The rules of a collaboration: turns, endings, refused moves, and what stays hidden."""

from __future__ import annotations

import json

import pytest
from collab_tasks import BRIEF, DOUBLE, FULL, JUNK, LETTER, NUMBER, talked
from game_checks import check_play, comparable
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dialop.collab.game import CollabGame
from dialop.collab.task import CollabInstance, CollabOptions

ASKED = [(1, "What number?"), (0, "My number is 5.")]


@pytest.mark.parametrize("options", [FULL, BRIEF])
@pytest.mark.parametrize("last", [(1, "so 5 + 3:\n[answer] 8"), (1, "[ Answer ] 9")])
def test_collab_keeps_the_game_interface(options: CollabOptions, last: tuple[int, str]) -> None:
    moves = [*ASKED, (1, "[message] Sure?"), (0, "yes"), last]
    check_play(CollabGame(NUMBER, options), moves, restore=CollabGame.from_state, junk=JUNK)


def test_the_user_can_end_it_and_then_nothing_is_earned() -> None:
    moves = [(1, "Hello."), (0, "Never mind.\n[end]")]
    game = CollabGame(LETTER, FULL)
    check_play(game, moves, restore=CollabGame.from_state, junk=JUNK)
    assert not game.outcome().agreed and game.outcome().rewards == (0.0, 0.0)


def test_a_golden_conversation() -> None:
    game = CollabGame(NUMBER, BRIEF)
    assert (game.prompt(1).system, game.prompt(1).user) == ("", "Add 3 to my number.")
    assert "My number is 5." in game.prompt(0).user
    assert game.step(1, "What number?").observations == ("What number?", "")
    assert game.step(0, "My number is 5.").observations == ("", "My number is 5.")
    step = game.step(1, "5 + 3 is 8.\n[answer] 8")
    assert (step.action, step.observations) == ("answer", ("[answer] 8", ""))
    outcome = game.outcome()
    assert outcome.over and outcome.agreed and outcome.rewards == (1.0, 1.0)
    assert outcome.facts == {
        "interactivity": 1.0,
        "user_moves": 1.0,
        "user_words": 4.0,
        "assistant_moves": 2.0,
        "assistant_words": 3.0,
    }


def test_each_seat_has_its_own_way_to_end() -> None:
    game = CollabGame(NUMBER, FULL)
    assert game.step(1, "[end]").error_kind == "not_yours"
    assert game.step(1, "[answer]").error_kind == "empty"
    assert game.step(0, "hi").error_kind == "not_your_turn"
    game.step(1, "What number?")
    assert game.step(0, "[answer] 8").error_kind == "not_yours"
    assert game.view(0).num_errors_this_turn == 1 and game.view(1).num_errors_this_turn == 0


@pytest.mark.parametrize("options", [FULL, BRIEF])
@pytest.mark.parametrize("instance", [NUMBER, LETTER, DOUBLE])
def test_the_assistant_is_told_the_request_and_nothing_else(
    instance: CollabInstance, options: CollabOptions
) -> None:
    game = talked(instance, "What is it about?", "Guess!", options=options)
    for texts in (game.prompt(1), CollabGame.from_state(game.state()).prompt(1)):
        text = texts.system + texts.user
        assert instance.request in text
        hidden = [line for line in instance.goal.split(". ") if line not in instance.request]
        assert not any(line in text for line in hidden)
        assert not instance.tests or instance.tests not in text
    view = game.view(1)
    assert view.goal is None and instance.goal not in repr(view)
    assert instance.target not in repr(view) and instance.goal in repr(game.view(0))


def test_reasoning_is_hidden_only_where_it_is_allowed() -> None:
    thinking = "the user hides it</think>What number?"
    assert talked(NUMBER, thinking).view(0).log[0].text == thinking
    options = CollabOptions(private_reasoning=True)
    assert talked(NUMBER, thinking, options=options).view(0).log[0].text == "What number?"


def test_brackets_in_a_message_are_just_text() -> None:
    for text in ("[dance] now", "see [1, 2]", "I'd say [answer] later", "[", "[accept"):
        game = talked(NUMBER, text)
        assert game.view(0).log[0].text == text and game.seat_to_move == 0


TAGS = ["[answer]", "[end]", "[ANSWER ]", "[message]", "[", "]", "\n", " ", "8", "hm", "</think>"]
ODD = ["\u2028", "\ud800", "\x00", "\u0130", "9" * 30, "\\frac", "\\boxed{", "}", "/", "%", "="]
PIECES = st.sampled_from([*TAGS, *ODD])
TEXTS = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=10).map("".join))
OPTIONS = st.builds(CollabOptions, brief=st.booleans(), private_reasoning=st.booleans())


@given(OPTIONS, st.sampled_from([NUMBER, LETTER]), st.lists(st.tuples(st.integers(0, 1), TEXTS)))
@example(FULL, NUMBER, [(1, "[answer] \\boxed{\\frac{1}{0}}")])
@hypothesis_settings(max_examples=200, deadline=None)
def test_no_text_raises_and_refusals_change_nothing(
    options: CollabOptions, instance: CollabInstance, moves: list[tuple[int, str]]
) -> None:
    game = CollabGame(instance, options)
    for seat, text in moves:
        before = comparable(game.state())
        step = game.step(seat, text)
        if step.error is None:
            assert step.action and len(game.view(0).log) == len(before["play"]["log"]) + 1
            assert game.view(0).log[-1].text or step.action == "end"
        else:
            assert step.action is None and step.error_kind and step.observations == ("", "")
            assert comparable(game.state()) == before
        assert 0 <= game.outcome().score_norm <= 1
        state = json.loads(json.dumps(game.state()))
        restored = CollabGame.from_state(state)
        assert restored.state() == state and restored.seat_to_move == game.seat_to_move
        for each in (0, 1):
            assert game.prompt(each).user and restored.prompt(each).user
            assert restored.view(each) == game.view(each)
