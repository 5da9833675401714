"""Grades of answers: BLEU by hand, interactivity, and tests that run in a sandbox."""

import math
from dataclasses import replace

import pytest

from dialop.collab.grading import bleu, check_tasks, grade, interactivity
from selfplay.extras.sandbox import code_of
from tests.helpers.bwrap import needs_bwrap
from tests.helpers.collab_tasks import DOUBLE, LETTER, NUMBER, talked


def test_bleu_by_hand() -> None:
    """Four of five words match, in two runs of two: 1-grams 4/5, 2-grams (2+1)/(4+1), 3-grams
    (0+1)/(3+1), 4-grams (0+1)/(2+1), no brevity penalty."""
    by_hand = (4 / 5 * 3 / 5 * 1 / 4 * 1 / 3) ** (1 / 4)
    assert bleu("the cat x sat down", "the cat has sat down") == pytest.approx(by_hand)
    assert bleu("A, b c!", "a b c") == pytest.approx(1.0)
    assert bleu("a b c", "a b c d e") == pytest.approx(math.exp(1 - 5 / 3))
    assert bleu("x y", "a b") == bleu("", "a") == bleu("a", "") == 0.0


@needs_bwrap
def test_code_is_graded_by_its_tests() -> None:
    assert grade(DOUBLE, DOUBLE.target) == 1.0
    assert grade(DOUBLE, f"Here it is:\n```python\n{DOUBLE.target}\n```\nGood luck!") == 1.0
    assert grade(DOUBLE, "def double(x):\n    return x") == 0.0
    assert grade(DOUBLE, "def twice(x):\n    return 2 * x") == 0.0


def test_the_code_of_an_answer_is_its_python_blocks() -> None:
    assert code_of("```\na = 1\n```\nand\n```py\nb = 2\n```") == "a = 1\n\nb = 2\n"
    install, code = "```bash\npip install x\n```", "```python3 title=a.py\nb = 2\n```"
    assert code_of(f"First:\n{install}\nThen:\n{code}\nShown:\n```text\n2\n```") == "b = 2\n"
    assert code_of("  ```Python\n  a = 1\n  ```") == "  a = 1\n"
    assert code_of("a = 1") == "a = 1"


@needs_bwrap
def test_check_needs_an_entry_point_or_a_call() -> None:
    """Without both nothing calls `check`, so every answer would pass: such a row is refused."""
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    with pytest.raises(ValueError, match="row 0: its tests pass an answer that raises"):
        check_tasks([("row 0", replace(DOUBLE, tests=check, entry_point=""))])
    assert grade(replace(DOUBLE, tests=check, entry_point="double"), DOUBLE.target) == 1.0
    assert grade(replace(DOUBLE, tests=f"{check}check(double)", entry_point=""), DOUBLE.target) == 1


def test_interactivity_by_hand() -> None:
    """Of four messages, two get information, one gets an empty reply and one asks nothing."""
    asked = "Who is it for?", "Her name is Ines.", "And how old is she?", "I don't know."
    other = "Nice name.", "Please go on.", "Where is the parcel?", "In the shed."
    game = talked(LETTER, *asked, *other)
    assert game.outcome().facts["interactivity"] == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (["What number?", "What number?"], 0),  # an echo
        (["How are you?", "What number?"], 0),  # a word of the request
        (["What number?", "It is blue."], 0),  # nothing of the goal
        (["Is it 5?", "Yes, 5."], 0),  # said before
        (["What number?", "5", "What number?", "It is 5."], 0.5),  # a repetition
        (["Hello.", "It is 5."], 0),  # nothing was asked
        (["What number?", "It is 5."], 1),
        (["[answer] 8"], 0),
    ],
)
def test_only_a_new_number_or_word_of_the_goal_is_something_told(
    said: list[str], share: float
) -> None:
    assert interactivity(NUMBER, talked(NUMBER, *said).view(1).log) == share


def test_a_number_that_the_request_has_too_is_told() -> None:
    same = replace(NUMBER, goal="Add 3 to my number. My number is 3.", target="6")
    assert interactivity(same, talked(same, "What number?", "It is 3.").view(1).log) == 1
