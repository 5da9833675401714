"""Grades answers in [0, 1]: equality of numbers, similarity of texts, or passing tests.

Grades are pure functions of instance and answer. Only the grade of code runs anything (`sandbox`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

from dialop.collab import sandbox
from dialop.collab.task import ASSISTANT, CollabInstance, Move
from dialop.collab.texts import EMPTY_REPLIES

MESSAGE = (ASSISTANT, "message")

_MAX_ORDER = 4
_TOLERANCE = 1e-6
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n`]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
_BOXED = re.compile(r"\\boxed\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
# LaTeX and text around a value that does not change it.
_DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|[,;!: $])|\^\s*(?:\{\s*)?\\circ\s*\}?|[$\s]"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox)\s*\{([^{}]*)\}")
# 2\frac{1}{2} and 2 1/2 are five halves.
_MIXED = re.compile(r"(?<![\d.])(\d+)\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_SPACED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)\s*/\s*(\d+)")
_NAME = re.compile(r"[a-z]\w*")  # of a value, as in x=5
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?", re.IGNORECASE)
_MAX_DIGITS = 400  # no real answer is longer, and arithmetic on longer numbers is slow


@lru_cache(maxsize=4096)
def grade(instance: CollabInstance, answer: str) -> float:
    """The answer's grade in [0, 1]. Cached, so equal answers to an instance are graded once.

    Raises:
        sandbox.NoSandbox: for a code task, if bubblewrap does not work on this machine.
    """
    if instance.task == "math":
        return float(equal_values(answer, instance.target))
    if instance.task == "writing":
        return bleu(answer, instance.target)
    code, tests = code_of(answer), instance.tests
    return float(sandbox.passes(code, tests=tests, entry_point=instance.entry_point))


def check_code(placed: Iterable[tuple[str, CollabInstance]]) -> None:
    """Check the tests of code tasks, each with its place in a file (`sandbox.check_tests`)."""
    sandbox.check_tests(
        [(place, task.tests, task.entry_point) for place, task in placed if task.task == "code"]
    )


def equal_values(answer: str, target: str) -> bool:
    """Whether two answers have the same value.

    Numbers are equal within a relative tolerance of 1e-6. Other texts must be equal after removing
    decoration (LaTeX spacing, units as text, dollar signs, thousands separators, a final dot, case,
    parentheses around a single letter). If a text contains `\\boxed{...}`, as published solutions
    do, only the content of the box counts.
    """
    one, other = _normal(answer), _normal(target)
    if "=" not in other:  # "x = 5" answers 5
        one = one.rpartition("=")[2]
    elif "=" not in one:
        name, _, value = other.partition("=")
        other = value if "=" not in value and _NAME.fullmatch(name) else other
    if one.removesuffix("%") == other.removesuffix("%"):  # 50 and 50 % are both used for a half
        return bool(one)
    numbers = _number(one), _number(other)
    if None in numbers:
        return False
    a, b = numbers
    assert a is not None and b is not None
    return abs(a - b) <= Fraction(_TOLERANCE) * max(abs(a), abs(b))


def interactivity(log: Sequence[Move]) -> float:
    """The share of the assistant's messages that ask a question and get information in reply.

    In [0, 1]; 0 without a message. A reply that is one of `EMPTY_REPLIES` holds no information.
    """
    messages = [index for index, move in enumerate(log) if (move.seat, move.kind) == MESSAGE]
    informative = [
        index
        for index in messages
        if "?" in log[index].text
        and index + 1 < len(log)
        and log[index + 1].kind == "message"
        and log[index + 1].text not in EMPTY_REPLIES
    ]
    return len(informative) / max(1, len(messages))


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


def code_of(answer: str) -> str:
    """The Python in an answer: its fenced blocks one after the other, without those of another
    language; all of the answer if it has none."""
    blocks = [code for tag, code in _FENCE.findall(answer) if tag.lower() in _PYTHON]
    return "\n".join(blocks) if blocks else answer


def _normal(text: str) -> str:
    """A value without decoration; of several `\\boxed{...}` the last one counts."""
    boxes = list(_BOXED.finditer(text))
    if boxes:
        text = _braced(text, boxes[-1].end())
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    for mixed in (_MIXED, _SPACED):
        text = mixed.sub(_improper, text)
    text = _FRACTION.sub(r"(\1)/(\2)", text)
    # Text beside a value is its unit; text alone is the answer.
    text = _plain(_TEXT.sub("", text)) or _plain(_TEXT.sub(r"\1", text))
    text = re.sub(r"\((-?\d+(?:\.\d+)?)\)", r"\1", text)
    return re.sub(r"^\(([a-z])\)$", r"\1", text)


def _improper(mixed: re.Match[str]) -> str:
    """The fraction of a mixed number."""
    if max(map(len, mixed.groups())) > _MAX_DIGITS:
        return mixed[0]
    whole, above, below = map(int, mixed.groups())
    return rf"\frac{{{whole * below + above}}}{{{below}}}"


def _plain(text: str) -> str:
    """The text without decoration."""
    text = _DECORATION.sub("", text).replace("\\%", "%").replace("−", "-")
    return _THOUSANDS.sub("", text).lower().removesuffix(".")


def _braced(text: str, start: int) -> str:
    """The text from `start` up to the brace that matches the one just before `start`."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return text[start:]


def _number(text: str) -> Fraction | None:
    """The value of a plain number, a fraction or a percentage; None for any other text."""
    if len(text) > _MAX_DIGITS:
        return None
    share = text.removesuffix("%")
    above, slash, below = share.partition("/")
    parts = [part for part in (above, below) if part or slash]
    if not parts or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    value = Fraction(parts[0])
    if slash:
        if Fraction(below) == 0:
            return None
        value /= Fraction(below)
    return value / 100 if share != text else value


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
