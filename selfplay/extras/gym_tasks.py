"""Tasks of the package reasoning-gym as rows of the published schema (`published`).

Each task has a question and facts. The user's first message is only the question, reworded to
invite questions if the package has only a sum, and only the user knows the facts. A task without a
number among its facts could be answered at once and is left out. Source: Stojanovski et al.,
Reasoning Gym, arXiv 2505.24760.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from dialop.collab.script import sentences
from dialop.specs import parse_spec, unknown

PREFIX = "reasoning_gym:"
NUM_TASKS = 5000  # the default

_LEGS = re.compile(r"if you have (.+)\?")
_SUM = re.compile(r": (.+) =")
_SIGNS = {"+": "Then {} is added.", "-": "Then {} is subtracted."}
_FORMAT = re.compile(r" *Give the result as your final answer\. Do not include units\.")


def rows_of_gym(spec: str, *, num: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """`num` tasks of a spec such as "leg_counting:max_animals=3", minus those left out, as pairs
    (location, row). The options are those of the package's data set.

    Raises:
        ValueError: for an unknown data set, an option that the package refuses, or if the package
            is not installed.
    """
    try:
        package: Any = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError:
        raise ValueError(
            f"{PREFIX}{spec} needs the package reasoning-gym: pip install -r requirements/tasks.txt"
        ) from None
    name = spec.partition(":")[0].strip()
    if name not in FACTS:
        raise ValueError(unknown("data set", name, tuple(FACTS)))
    valid = [field.name for field in fields(package.factory.DATASETS[name][1])]
    _, given = parse_spec(spec, {name: [each for each in valid if each not in ("seed", "size")]})
    try:
        options = {option: json.loads(value) for option, value in given.items()}
        tasks = package.create_dataset(name, **{"seed": seed, "size": num, **options})
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{PREFIX}{spec}: {error}") from None
    rows = []
    for index in range(num):
        task = tasks[index]
        if tasks.score_answer(task["answer"], task) != 1:
            raise ValueError(f"{PREFIX}{spec} {index}: the package rejects its own answer")
        facts, question = FACTS[name](task["question"])
        if re.search(r"\d", facts):
            rows.append((f"{PREFIX}{spec} {index}", _row(facts, question, task["answer"])))
    return rows


def _row(facts: str, question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "single_turn_prompt": f"{facts} {question}",
        "single_turn_completion": answer,
        "single_turn_metadata": {"task": "math"},
    }


def _word_problem(text: str) -> tuple[str, str]:
    """The sentences of a word problem before its last one, and the last one, its question."""
    *facts, question = sentences(_FORMAT.sub("", text))
    return " ".join(facts), question


def _legs(text: str) -> tuple[str, str]:
    animals = _LEGS.findall(text)[-1].split(", ")
    facts = " ".join(f"There are {animal}." for animal in animals)
    return facts, "I want to count the legs of my animals. Can you help me?"


def _sum(text: str) -> tuple[str, str]:
    first, *rest = _SUM.findall(text)[-1].split()
    steps = (
        _SIGNS[sign].format(number) for sign, number in zip(rest[::2], rest[1::2], strict=True)
    )
    facts = " ".join([f"The first number is {first}.", *steps])
    return facts, "I need to add and subtract some numbers. Can you help me?"


# For each data set, the function that splits a question of the package into (facts, question).
FACTS: dict[str, Callable[[str], tuple[str, str]]] = {
    "chain_sum": _sum,
    "gsm_symbolic": _word_problem,
    "leg_counting": _legs,
}
