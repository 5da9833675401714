"""Grades answers in [0, 1]: equality of numbers, similarity of texts, or passing tests.

Grades are pure functions of instance and answer. Only code answers are run, in the sandbox of the
module CODE_GRADER, which is imported by name, because games do not import the trainer.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from dialop.collab.script import content_words
from dialop.collab.task import ASSISTANT, USER, CollabInstance
from dialop.collab.value import check_target, equal_values, is_missing
from dialop.logged import Move

CODE_GRADER = "selfplay.extras.sandbox"
MESSAGE = (ASSISTANT, "message")

_MAX_ORDER = 4


@lru_cache(maxsize=4096)
def grade(instance: CollabInstance, answer: str) -> float:
    """The answer's grade in [0, 1]. Cached, so equal answers to an instance are graded once.

    Raises:
        MachineError: for a code task, if bubblewrap does not work on this machine.
    """
    if instance.task == "math":
        return float(equal_values(answer, instance.target))
    if instance.task == "writing":
        return bleu(answer, instance.target)
    tests, entry_point = instance.tests, instance.entry_point
    return float(_sandbox().grade(answer, tests=tests, entry_point=entry_point))


def check_tasks(placed: Iterable[tuple[str, CollabInstance]]) -> None:
    """Check that the tasks, each with its place in a file, can be graded.

    Raises:
        ValueError: for the first math task whose target has no value, the first writing task
            without a text, or the first code task whose tests check nothing (`check_tests` of
            CODE_GRADER).
    """
    tests = []
    for place, task in placed:
        if task.task == "code":
            tests.append((place, task.tests, task.entry_point))
        elif task.task == "math":
            try:
                check_target(task.target)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        elif is_missing(task.target):
            rule = "the target of a writing task must be a text"
            raise ValueError(f"{place}: {rule}, got {task.target!r}")
    if tests:
        _sandbox().check_tests(tests)


def _sandbox() -> Any:
    """The module that runs code, with `grade` and `check_tests`."""
    return importlib.import_module(CODE_GRADER)


def solved(instance: CollabInstance, text: str) -> bool:
    """Whether a user's text has the result of a math task (a number, ignoring its sign) that the
    goal does not contain. Otherwise a user could learn to state it, and an assistant to elicit it,
    for example by a wrong guess. A number in words is not recognized."""
    number = instance.target.strip().lstrip("-")
    if instance.task != "math" or not re.fullmatch(r"\d+(?:\.\d+)?", number):
        return False
    stated = re.compile(rf"(?<![\d.])0*{re.escape(number)}(?:\.0+)?(?!\d|\.\d)")
    return bool(stated.search(text)) and not stated.search(instance.goal)


def interactivity(instance: CollabInstance, log: Sequence[Move]) -> float:
    """The share of the assistant's messages that ask a question and get new information in reply.

    In [0, 1]; 0 without a message. A reply, or last words before the user's end, is informative if
    it has a number, or a word that the request lacks, from the goal's other sentences that neither
    seat has said before.
    """
    asked = content_words(instance.request)
    facts = content_words(instance.goal.replace(instance.request, ""))
    facts = {word for word in facts if word.isdigit() or word not in asked}
    num_replies = 0
    for place, move in enumerate(log):
        new = content_words(move.text) & facts
        num_replies += move.seat == USER and place > 0 and "?" in log[place - 1].text and bool(new)
        facts -= new
    return num_replies / max(1, sum((move.seat, move.kind) == MESSAGE for move in log))


def bleu(text: str, reference: str) -> float:
    """The similarity of a text to a reference, in [0, 1]: sentence BLEU on lower-case words.

    The geometric mean of the clipped precisions of 1- to 4-grams, times the brevity penalty
    min(1, exp(1 - |reference| / |text|)) (Papineni et al., ACL 2002, eq. 1-3). For orders above
    one, 1 is added to the matches and to the n-grams, so that a text without a matching 4-gram does
    not score 0 (Lin and Och, COLING 2004). A reference of fewer than four words limits the order.
    """
    words, reference_words = _words(text), _words(reference)
    if not words or not reference_words:
        return 0.0
    log_sum, max_order = 0.0, min(_MAX_ORDER, len(reference_words))
    for order in range(1, max_order + 1):
        smoothing = int(order > 1)
        matches = _ngrams(words, order) & _ngrams(reference_words, order)
        num_matches = matches.total() + smoothing
        num_ngrams = max(0, len(words) - order + 1) + smoothing
        if num_matches == 0:
            return 0.0
        log_sum += math.log(num_matches / num_ngrams)
    penalty = min(1.0, math.exp(1 - len(reference_words) / len(words)))
    return penalty * math.exp(log_sum / max_order)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
