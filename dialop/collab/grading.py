"""Grades answers in [0, 1]: equality of numbers, similarity of texts, or passing tests.

Grades are pure functions of instance and answer. Only the grade of code runs anything, in the
sandbox of the module CODE_GRADER. That is found by its name, because games import no trainer.
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
    """Check that the tasks can be graded, each with its place in a file.

    Raises:
        ValueError: for the first math task whose target holds no value, the first writing task
            without a text, and the first code task whose tests check nothing
            (`check_tests` of CODE_GRADER).
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
            raise ValueError(
                f"{place}: the target of a writing task must be a text, got {task.target!r}"
            )
    if tests:
        _sandbox().check_tests(tests)


def _sandbox() -> Any:
    """What runs code: `grade` and `check_tests`."""
    return importlib.import_module(CODE_GRADER)


def solved(instance: CollabInstance, text: str) -> bool:
    """Whether a user's text has the number, without its sign, that a math task asks for, though the
    goal does not have it. An assistant could learn to be told it, for example by a wrong guess, and
    a user that learns to tell it. A number in words is not recognized."""
    number = instance.target.strip().lstrip("-")
    if instance.task != "math" or not re.fullmatch(r"\d+(?:\.\d+)?", number):
        return False
    stated = re.compile(rf"(?<![\d.])0*{re.escape(number)}(?:\.0+)?(?!\d|\.\d)")
    return bool(stated.search(text)) and not stated.search(instance.goal)


def interactivity(instance: CollabInstance, log: Sequence[Move]) -> float:
    """The share of the assistant's messages that ask a question and are told something in reply.

    In [0, 1]; 0 without a message. A reply, or last words before the user's end, tells something if
    it has a number, or a word that the request lacks, of the goal's other sentences that nobody has
    said before.
    """
    asked = content_words(instance.request)
    facts = content_words(instance.goal.replace(instance.request, ""))
    facts = {word for word in facts if word.isdigit() or word not in asked}
    num_told = 0
    for place, move in enumerate(log):
        new = content_words(move.text) & facts
        num_told += move.seat == USER and place > 0 and "?" in log[place - 1].text and bool(new)
        facts -= new
    return num_told / max(1, sum((move.seat, move.kind) == MESSAGE for move in log))


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
    log_sum = 0.0
    max_order = min(_MAX_ORDER, len(reference_words))
    for order in range(1, max_order + 1):
        ngrams, reference_ngrams = _ngrams(words, order), _ngrams(reference_words, order)
        num_matches = sum(min(count, reference_ngrams[ngram]) for ngram, count in ngrams.items())
        smoothing = int(order > 1)
        num_matches += smoothing
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
