"""The scripted user tells only what it is asked for; asking scores more than guessing."""

from dialop.collab.game import CollabGame
from dialop.collab.numbers import hidden_number, solve
from dialop.collab.script import make_scripted, untold
from dialop.collab.task import ASSISTANT, USER, CollabInstance, CollabOptions
from tests.helpers.collab_tasks import LETTER, talked


def user_says(instance: CollabInstance, *texts: str, spec: str = "user", seed: int = 0) -> str:
    return make_scripted(spec, seed=seed).act(talked(instance, *texts).view(USER))


def test_the_user_tells_what_is_asked_for_once() -> None:
    assert user_says(LETTER, "What is her name?") == "Her name is Ines."
    assert user_says(LETTER, "Where is the parcel now?") == "The parcel is in the shed."
    assert user_says(LETTER, "Does she like cats?") == "I don't know."
    assert user_says(LETTER, "What else should I know?") == "Her name is Ines."
    assert user_says(LETTER, "I will begin.") == "Please go on."
    told = ("What is her name?", "Her name is Ines.")
    assert user_says(LETTER, *told, "Her name?") == "I don't know."
    rest = (*told, "Where is the parcel?", "The parcel is in the shed.")
    assert user_says(LETTER, *rest, "Anything else?") == "That is all I know."


def test_an_impatient_user_leaves() -> None:
    assert user_says(LETTER, "a", "b", "c", spec="user:patience=1") == "[end]"
    assert user_says(LETTER, "a", "b", "c", spec="user:patience=2") == "Please go on."


def played(spec: str, instance: CollabInstance, seed: int) -> CollabGame:
    game = CollabGame(instance, CollabOptions(brief=True))
    players = {USER: make_scripted("user", seed=seed), ASSISTANT: make_scripted(spec, seed=seed)}
    while (seat := game.seat_to_move) is not None:
        assert game.step(seat, players[seat].act(game.view(seat))).error is None
    return game


def test_asking_beats_guessing() -> None:
    scores = {
        spec: sum(
            played(spec, hidden_number(seed=7, index=i, max_value=10), i).outcome().score_norm
            for i in range(150)
        )
        / 150
        for spec in ("ask", "guess", "chat")
    }
    assert scores["ask"] == 1.0
    assert 0.04 < scores["guess"] < 0.17 and 0.04 < scores["chat"] < 0.17, "a guess is one in ten"


def test_asking_draws_a_whole_text_out() -> None:
    asked, guessed = played("ask", LETTER, 0), played("guess", LETTER, 0)
    assert untold(asked.view(USER)) == [] and len(untold(guessed.view(USER))) == 2
    assert asked.outcome().score_norm > 0.2 > guessed.outcome().score_norm


def test_hidden_numbers_are_a_function_of_seed_and_index() -> None:
    drawn = [hidden_number(seed=1, index=i, max_value=10) for i in range(200)]
    assert drawn == [hidden_number(seed=1, index=i, max_value=10) for i in range(200)]
    assert len({instance.key for instance in drawn}) == 200
    assert {instance.request.split()[0] for instance in drawn} == {"Add", "Take"}
    assert drawn != [hidden_number(seed=2, index=i, max_value=10) for i in range(200)]
    assert solve("Take 4 from my number.", "My number is 1.") == -3
    assert solve("Take 4 from my number.", "I don't know.") is None
