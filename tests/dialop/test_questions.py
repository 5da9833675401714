"""The example with twenty questions: its rules by hand, and the best questions by brute force."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dialop.checks import check_kit
from dialop.kit import load_kit
from examples.questions.questions import EVERY, HAVE, OBJECTS, OPTIMUM, Instance, fewest, least

GAME = Path(__file__).resolve().parents[2] / "examples/questions/questions.py"
KIT = load_kit(str(GAME))
OPTIONS = KIT.Options()


def played(thing: str, *moves: str) -> Any:
    game = KIT.new_game(Instance("hand", thing), OPTIONS)
    for move in moves:
        seat = game.seat_to_move
        assert seat is not None and game.step(seat, move).error is None
    return game


def answer(attribute: str, thing: str) -> str:
    return "[yes]" if HAVE[attribute] >> OBJECTS.index(thing) & 1 else "[no]"


def test_the_game_passes_the_checks_in_at_most_150_lines() -> None:
    assert len(GAME.read_text(encoding="utf-8").splitlines()) <= 150
    assert not [line.line() for line in check_kit(KIT, OPTIONS) if line.problem]


def test_each_object_has_attributes_of_its_own_and_attributes_are_rare() -> None:
    rows = {tuple(with_it >> at & 1 for with_it in HAVE.values()) for at in range(64)}
    assert len(rows) == len(OBJECTS) == 64
    assert all(0.15 < with_it.bit_count() / 64 < 0.45 for with_it in HAVE.values())
    assert fmean(with_it.bit_count() / 64 for with_it in HAVE.values()) < 0.31


def test_a_score_is_the_optimum_through_the_questions_and_0_for_a_wrong_guess() -> None:
    right = ["[ask] a", answer("a", "BA")] * 8
    assert played("BA", *right, "[guess] BA").outcome().score_norm == pytest.approx(OPTIMUM / 8)
    assert played("BA", *right[:10], "[guess] BA").outcome().score_norm == 1.0
    assert played("BA", *right, "[guess] BE").outcome().rewards == (0.0, 0.0)
    assert not played("BA", *right).outcome().over


def test_a_false_answer_is_counted_and_words_after_an_answer_are_not_read() -> None:
    true, false = answer("b", "KU"), {"[yes]": "[no]", "[no]": "[yes]"}[answer("c", "KU")]
    game = played("KU", "[ask] b", true, "[ask] c", false)
    has = game.prompt(1).user.removeprefix("object KU: ").split()
    assert has == [each for each in HAVE if answer(each, "KU") == "[yes]"]
    assert game.measures((1,))["statements"] == 2 and game.measures((1,))["true_statements"] == 1
    assert game.measures((0,))["statements"] == 0 and game.measures((0,))["asked"] == 2
    twin = played("KU", "[ask] b")
    assert twin.step(1, f"{true} it is KU").observations == (true[1:-1], "")


@pytest.mark.parametrize(
    ("seat", "move", "kind"),
    [(0, "[yes]", "not_yours"), (0, "[ask] z", "no_attribute"), (0, "[guess] cat", "no_object")],
)
def test_wrong_moves(seat: int, move: str, kind: str) -> None:
    assert played("BA").step(seat, move).error_kind == kind
    assert played("BA", "[ask] a").step(1, "[ask] b").error_kind == "not_yours"


def brute(left: int) -> int:
    """The same as `fewest` without bounds: every attribute is tried."""
    if left.bit_count() == 1:
        return 0
    halves = ((left & each, left & ~each) for each in HAVE.values())
    return left.bit_count() + min(brute(a) + brute(b) for a, b in halves if a and b)


def test_the_fewest_questions_are_those_of_brute_force() -> None:
    """Of the first, last and every ninth few objects; never below a full binary tree."""
    for few in (0b11111, 0b111111 << 58, sum(1 << at for at in range(0, 64, 9))):
        assert fewest(few) == brute(few) >= least(few.bit_count())
    assert [least(num) for num in (1, 2, 3, 4, 64)] == [0, 2, 5, 8, 64 * 6]


def test_greedy_questions_need_little_more_than_the_best() -> None:
    """Each object once: 6.14 questions where the best need 6.125. Random ones need more."""
    num: dict[str, list[float]] = {"greedy": [], "any": []}
    for name, found in num.items():
        for number, thing in enumerate(OBJECTS):
            game = KIT.new_game(Instance(thing, thing), OPTIONS)
            scripts = [KIT.make_script(spec, seed=number) for spec in KIT.seated(name)]
            while (seat := game.seat_to_move) is not None:
                assert game.step(seat, scripts[seat].act(game.view(seat))).error is None
            assert game.measures((0, 1))["right"] == 1
            found.append(game.outcome().score)
    assert fewest(EVERY) / 64 == OPTIMUM == 6.125
    assert OPTIMUM <= fmean(num["greedy"]) < 6.2 < 6.5 < fmean(num["any"])
