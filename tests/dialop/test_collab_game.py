"""The rules of a collaboration: turns, endings, refused moves, and what stays hidden."""

from dataclasses import replace

import pytest

from dialop.collab.game import CollabGame
from dialop.collab.task import CollabInstance, CollabOptions
from tests.helpers.collab_tasks import BRIEF, DOUBLE, FULL, LETTER, NUMBER, THOUGHTS, talked


def test_an_end_by_the_user_earns_nothing() -> None:
    game = talked(LETTER, "Hello.", "Never mind.\n[end]")
    assert not game.outcome().agreed and game.outcome().rewards == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("My number is 5.\n[end]", "My number is 5."),
        ("[message] My number is 5.\n\n [END] Bye.", "My number is 5.\nBye."),
        ("[end] My number is 5.", "My number is 5."),
        ("One.\nTwo.\r\n[ end ]\nThree.", "One.\nTwo.\nThree."),
        ("[end]", ""),
        ("I don't know.\n[end]", "I don't know."),
    ],
)
def test_a_reply_before_the_users_end_is_its_last_words(text: str, words: str) -> None:
    """The assistant reads them, they are counted, and they answer its question."""
    game = talked(NUMBER, "What number?")
    step = game.step(0, text)
    assert (step.action, game.seat_to_move, game.view(1).log[1].text) == ("end", None, words)
    assert step.observations[1].replace("\n  ", "\n") == f"[end] {words}".rstrip()
    facts = game.outcome().facts
    assert facts["user_words"] == len(words.split())
    assert facts["interactivity"] == float("number is 5" in words)


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


def test_only_the_assistant_is_paid_for_asking() -> None:
    """One of its two messages got something out of the user, so its rating is 0.5."""
    said = "Hello.", "Hi.", "What number?", "My number is 5."
    game = talked(NUMBER, *said, options=CollabOptions(accuracy=2.0), interactivity=0.4)
    assert game.outcome().rewards == (0.0, pytest.approx(0.2))
    game.step(1, "[answer] 8")
    assert game.outcome().rewards == (2.0, pytest.approx(2.2))


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


def test_a_simulated_user_reads_its_facts_with_each_message_and_never_the_question() -> None:
    """A small model that reads the question answers it. A goal that is all request is all facts."""
    game = talked(NUMBER)
    said = game.step(1, "What number?").observations[0]
    assert "What number?" in said and "My number is 5." in said and NUMBER.request not in said
    assert NUMBER.goal not in game.prompt(0).system + game.prompt(0).user
    whole = talked(replace(NUMBER, goal=NUMBER.request)).step(1, "What number?").observations[0]
    assert NUMBER.request in whole
    assert talked(NUMBER, "What number?", "It is 5.").step(1, "[answer] 8").observations[0] == (
        "[answer] 8"
    )


def test_a_user_does_not_tell_the_result() -> None:
    game = talked(NUMBER, "It is 7, is it not?")
    for text in ("No, 5 + 3 = 8.", "8.0", "It is 08.00."):
        assert game.clone().step(0, text).error_kind == "solved"
    for text in ("My number is 5.", "It is 18, or 8.5, 8.05, 80 or 108."):
        assert game.clone().step(0, text).error is None
    told = replace(NUMBER, goal="Add 3 to my number. My number is 5. I have 8 cats.")
    assert talked(told, "And your cats?").step(0, "I have 8 cats.").error is None
    minus = replace(NUMBER, goal="Take 9 from my number. My number is 5.", target="-4")
    assert talked(minus, "Is it 3?").step(0, "No, minus 4.").error_kind == "solved"


@pytest.mark.parametrize("form", THOUGHTS)
def test_reasoning_is_hidden_only_where_it_is_allowed(form: str) -> None:
    thinking = f"{form.format('the user hides it')}What number?".strip()
    assert talked(NUMBER, thinking).view(0).log[0].text == thinking
    options = CollabOptions(private_reasoning=True)
    assert talked(NUMBER, thinking, options=options).view(0).log[0].text == "What number?"


def test_brackets_in_a_message_are_just_text() -> None:
    for text in ("[dance] now", "see [1, 2]", "I'd say [answer] later", "[", "[accept"):
        game = talked(NUMBER, text)
        assert game.view(0).log[0].text == text and game.seat_to_move == 0
