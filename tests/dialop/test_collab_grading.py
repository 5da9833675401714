"""Grades of answers: equal values, BLEU by hand, and tests that run in a sandbox."""

import math
from dataclasses import replace

import pytest

from dialop.collab.grading import bleu, check_code, code_of, equal_values, grade, interactivity
from tests.helpers.bwrap import needs_bwrap
from tests.helpers.collab_tasks import DOUBLE, LETTER, NUMBER, talked


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        *(("42", "42.0"), (" 1,234 ", "1234"), ("\\frac{14}{3}", "14/3")),
        *(("$\\boxed{\\dfrac{1}{2}}$", "0.5"), ("it is 60 and 180, so \\boxed{3060}.", "3060")),
        *(("3060", "There are 60 child tickets, so \\boxed{3060}."), ("x = 5", "5")),
        *(("50%", "50"), ("50\\%", "0.5"), ("5\\text{ cm}", "5"), ("90^\\circ", "90")),
        *(("$12$.", "12"), ("\\sqrt{2}", "$\\sqrt {2}$"), ("(3, 4)", "(3,4)")),
        *(
            ("-0.3333333", "-1/3"),
            ("Friday", "\\boxed{\\text{Friday}}"),
            ("\\text{C}", "\\textbf{(C)}"),
        ),
        *(("2.5", "\\boxed{2\\frac{1}{2}}"), ("5/2", "2\\frac12"), ("-2 1/2", "-2.5")),
        *(("5", "\\boxed{x=5}"), ("x=5", "x = 5"), ("2x+3", "y = 2x + 3")),
    ],
)
def test_equal_values(answer: str, target: str) -> None:
    assert equal_values(answer, target) and equal_values(target, target)


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        *(("-3", "3"), ("", ""), ("1/0", "2"), ("7 or 8", "7"), ("0.333", "1/3"), ("9" * 500, "9")),
        *(("10.5", "2\\frac{1}{2}"), ("1 2/3", "12/3"), ("\\text{Monday}", "\\text{Friday}")),
        *(("y=5", "x=5"), ("x", "x=5=5")),
    ],
)
def test_other_values(answer: str, target: str) -> None:
    assert not equal_values(answer, target)


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
        check_code([("row 0", replace(DOUBLE, tests=check, entry_point=""))])
    assert grade(replace(DOUBLE, tests=check, entry_point="double"), DOUBLE.target) == 1.0
    assert grade(replace(DOUBLE, tests=f"{check}check(double)", entry_point=""), DOUBLE.target) == 1


def test_interactivity_by_hand() -> None:
    """Of four messages, two get information, one gets an empty reply and one asks nothing."""
    game = talked(
        LETTER,
        "Who is it for?",
        "Her name is Ines.",
        "And how old is she?",
        "I don't know.",
        "Nice name.",
        "Please go on.",
        "Where is the parcel?",
        "In the shed.",
    )
    assert interactivity(game.view(1).log) == pytest.approx(2 / 4)
    assert game.outcome().facts["interactivity"] == pytest.approx(2 / 4)
    assert interactivity(talked(NUMBER, "[answer] 8").view(1).log) == 0.0
