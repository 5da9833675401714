"""Tasks of reasoning-gym: the question alone is the request, and its facts stay with the user."""

import sys
from pathlib import Path

import pytest

from dialop.collab.grading import grade
from dialop.collab.kit import read
from dialop.collab.script import sentences
from selfplay.extras.gym_tasks import FACTS, PREFIX, rows_of_gym
from selfplay.extras.prepare import main
from selfplay.extras.published import instances_of

SPECS = ("chain_sum:max_terms=3", "gsm_symbolic", "leg_counting:max_animals=3")


@pytest.mark.parametrize(
    ("name", "text", "facts", "question"),
    [
        (
            "chain_sum",
            "State the final answer to the following arithmetic problem: 4 - 17 + 5 =",
            "The first number is 4. Then 17 is subtracted. Then 5 is added.",
            "I need to add and subtract some numbers. Can you help me?",
        ),
        (
            "leg_counting",
            "Count legs when given a list.\n\nNow, how many legs are there in total if you have "
            "1 sea slug, 12 cats?\n",
            "There are 1 sea slug. There are 12 cats.",
            "I want to count the legs of my animals. Can you help me?",
        ),
        (
            "gsm_symbolic",
            "In Mr. Smith's class 80% of 100 swim. The rest run. How many run? Give the result as "
            "your final answer. Do not include units.",
            "In Mr. Smith's class 80% of 100 swim. The rest run.",
            "How many run?",
        ),
    ],
)
def test_a_question_is_split_into_its_facts_and_what_is_asked(
    name: str, text: str, facts: str, question: str
) -> None:
    assert FACTS[name](text) == (facts, question)


@pytest.mark.parametrize("spec", SPECS)
def test_the_request_holds_no_fact_and_the_grade_is_the_packages(spec: str) -> None:
    """A whole number has grade 1 exactly where the package's score is 1. The package also scores
    texts that only contain the number, or its negative, which have grade 0."""
    package = pytest.importorskip("reasoning_gym")
    rows = rows_of_gym(spec, num=40, seed=3)
    tasks = instances_of(rows, name="gym")
    assert len(tasks) > 30 and rows == rows_of_gym(spec, num=40, seed=3)
    scorer = package.create_dataset(spec.partition(":")[0], seed=0, size=1)
    for task in tasks:
        facts = sentences(task.goal.removesuffix(task.request))
        assert facts and not any(fact in task.request for fact in facts)
        number = int(float(task.target))
        for answer in (number, number + 1, number - 1, 10 * number + 1, -number - 1):
            score = scorer.score_answer(str(answer), {"answer": task.target, "metadata": {}})
            assert grade(task, str(answer)) == (score == 1), (task.goal, answer)
        scored = [f"{number}, {number + 1}", str(-number or 1)]
        assert [grade(task, text) for text in scored] == [0, 0]


def test_prepare_writes_generated_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")

    def wrong(spec: str) -> str:
        words = ["--dataset", f"{PREFIX}{spec}", "--limit", "30", "--out", str(tmp_path / "out")]
        assert main(words) == 2
        return capsys.readouterr().err

    assert main(["--dataset", f"{PREFIX}{SPECS[0]}", "--limit", "30", "--out", str(tmp_path)]) == 0
    assert len(read(tmp_path / "train.parquet")) == 24
    assert "choose one of chain_sum, gsm_symbolic, leg_counting" in wrong("legs")
    assert "nearest is max_terms" in wrong("chain_sum:max_term=3")
    assert "max_terms must be >= min_terms" in wrong("chain_sum:max_terms=1")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install -r requirements/tasks\.txt"):
        rows_of_gym("chain_sum", num=1, seed=0)
