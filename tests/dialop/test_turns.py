"""The base class of games of tagged moves: states, restored prompts, private replies."""

import json
from dataclasses import dataclass

import pytest

from dialop.forms import tag_forms
from dialop.game import Outcome, PlayerError
from dialop.turns import TurnGame


@dataclass(frozen=True)
class Instance:
    key: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    loud: bool = False


class Whisper(TurnGame):
    """Seat 0 may look a word up, which only it reads, and then speaks to seat 1."""

    num_seats, tags, instance_type, options_type = 2, ("look", "message"), Instance, Options
    rules = "look, then speak"

    def sees(self, seat: int) -> str:
        return f"you are {seat}"

    def play(self, seat: int, tag: str, content: str) -> int | None:
        if tag == "look":
            if not content.isdecimal() or int(content) >= len(self.instance.words):
                raise PlayerError("no_word", "no such word")
            self.show(seat, self.instance.words[int(content)])
            return seat
        return None if seat else 1

    def outcome(self) -> Outcome:
        over = self.seat_to_move is None
        return Outcome(over=over, agreed=over, score=0.0, score_norm=0.0, rewards=(0.0, 0.0))


def game() -> Whisper:
    return Whisper(Instance("w", ("red", "blue")), Options())


class Deal(Whisper):
    """Seat 0 speaks; seat 1 takes what it hears, without a word."""

    tags, bare = ("message", "take"), ("take",)

    def play(self, seat: int, tag: str, content: str) -> int | None:
        return None if tag == "take" else 1 - seat


def test_a_bare_move_needs_no_content_and_is_a_button() -> None:
    deal = Deal(Instance("d", ()), Options())
    assert deal.step(0, "[message]").error_kind == "empty"
    deal.step(0, "[message] three apples")
    assert [(form.before, form.button) for form in tag_forms(deal)] == [
        ("[message] ", False),
        ("[take]", True),
    ]
    step = deal.step(1, "[take]")
    assert step.action == "take" and step.observations == ("seat 1: [take]", "")
    assert deal.log[-1] == (1, "take", "") and Deal.from_state(deal.state()).log == deal.log


def test_a_private_answer_is_read_by_its_seat_and_the_turn_stays() -> None:
    whisper = game()
    step = whisper.step(0, "[look] 1")
    assert step.observations == ("blue", "") and whisper.seat_to_move == 0
    assert whisper.step(0, "[message] a\nb").observations == ("", "seat 0: [message] a\n  b")


def test_a_restored_game_shows_what_was_read() -> None:
    whisper = game()
    for seat, text in ((0, "[look] 0"), (0, "[look] 7"), (0, "[message] hi")):
        whisper.step(seat, text)
    state = json.loads(json.dumps(whisper.state()))
    twin = Whisper.from_state(state)
    assert twin.state() == whisper.state() == state and twin.seat_to_move == 1
    assert twin.prompt(0).user == "you are 0\nred"
    assert twin.prompt(1).user == "you are 1\nseat 0: [message] hi"
    assert state["num_errors"] == [1, 0]


def test_a_state_with_a_refused_move_is_refused() -> None:
    state = {**game().state(), "moves": [[0, "[look] 9"]]}
    with pytest.raises(ValueError, match="no such word"):
        Whisper.from_state(state)


@pytest.mark.parametrize(
    ("seat", "text", "kind"),
    [
        (1, "[message] hi", "not_your_turn"),
        (0, "hi", "no_tag"),
        (0, "[shout] hi", "no_tag"),
        (0, "[look]", "empty"),
        (0, "[look] 2", "no_word"),
    ],
)
def test_what_is_refused_changes_nothing(seat: int, text: str, kind: str) -> None:
    whisper = game()
    assert whisper.step(seat, text).error_kind == kind
    assert whisper.log == [] and whisper.seat_to_move == 0
