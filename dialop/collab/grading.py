"""What an answer is worth, in [0, 1]: equality of numbers, closeness of texts, tests that pass.

Pure functions of instance and answer. Only the code metric runs anything (`sandbox`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from dialop.collab import sandbox
from dialop.collab.task import ASSISTANT, CollabInstance, Said
from dialop.collab.texts import EMPTY_REPLIES

MESSAGE = (ASSISTANT, "message")

_MAX_ORDER = 4
_TOLERANCE = 1e-6
_FENCE = re.compile(r"```[ \t]*(?:(?:python|py)[ \t]*)?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
# What LaTeX and prose put around a value without changing it.
_DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|[,;!: $])|\\(?:text|mbox)\s*\{[^{}]*\}"
    r"|\^\s*(?:\{\s*)?\\circ\s*\}?|[$\s]"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?", re.IGNORECASE)
_MAX_DIGITS = 400  # longer "numbers" are no answers, and arithmetic on them only costs time


@lru_cache(maxsize=4096)
def grade(instance: CollabInstance, answer: str, *, code_wall: str = "auto") -> float:
    """The answer's grade; the same answer to the same instance is graded once.

    Raises sandbox.NoWall for code where the wall does not stand.
    """
    if instance.task == "math":
        return float(equal_values(answer, instance.target))
    if instance.task == "writing":
        return bleu(answer, instance.target)
    return float(
        sandbox.passes(
            code_of(answer),
            tests=instance.tests,
            entry_point=instance.entry_point,
            wall=code_wall,
        )
    )


def equal_values(answer: str, target: str) -> bool:
    """Whether two answers are the same value: as numbers within 1e-6 of the larger, else as texts
    without decoration (LaTeX spacing, dollar signs, thousands' commas, a final dot, case).

    A `\\boxed{...}` in either stands for the whole, as in published solutions.
    """
    one, other = _normal(answer), _normal(target)
    if "=" not in other:  # "x = 5" answers 5
        one = one.rpartition("=")[2]
    if one.removesuffix("%") == other.removesuffix("%"):  # both 50 and 50 % are said of a half
        return bool(one)
    numbers = _number(one), _number(other)
    if None in numbers:
        return False
    a, b = numbers
    assert a is not None and b is not None
    return abs(a - b) <= Fraction(_TOLERANCE) * max(abs(a), abs(b))


def interactivity(log: Sequence[Said]) -> float:
    """A rubric in [0, 1] for how well the assistant drew the goal out: the share of its messages
    that ask something and get something out of the user; 0 without a message.

    A reply that only says that the user has nothing to say gets nothing out.
    """
    asked = [place for place, said in enumerate(log) if (said.seat, said.kind) == MESSAGE]
    drawn = [
        place
        for place in asked
        if "?" in log[place].text
        and place + 1 < len(log)
        and log[place + 1].kind == "message"
        and log[place + 1].text not in EMPTY_REPLIES
    ]
    return len(drawn) / max(1, len(asked))


def bleu(text: str, reference: str) -> float:
    """How close a text is to a reference, in [0, 1]: sentence BLEU on lower-case words.

    The geometric mean of the clipped precisions of 1- to 4-grams, times the brevity penalty
    min(1, exp(1 - |reference| / |text|)) (Papineni et al., ACL 2002, eq. 1-3). Orders above one
    count one more match and one more n-gram, so that a short text is not worth 0 for want of a
    4-gram (Lin and Och, COLING 2004); a text is compared up to its reference's longest order.
    """
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return 0.0
    log_sum = 0.0
    max_order = min(_MAX_ORDER, len(wanted))
    for order in range(1, max_order + 1):
        said, there = _ngrams(words, order), _ngrams(wanted, order)
        num_matches = sum(min(count, there[ngram]) for ngram, count in said.items())
        more = int(order > 1)
        num_matches, num_said = num_matches + more, max(0, len(words) - order + 1) + more
        if num_matches == 0:
            return 0.0
        log_sum += math.log(num_matches / num_said)
    penalty = min(1.0, math.exp(1 - len(wanted) / len(words)))
    return penalty * math.exp(log_sum / max_order)


def code_of(answer: str) -> str:
    """The Python in an answer: its fenced blocks one after the other, or all of it."""
    blocks = _FENCE.findall(answer)
    return "\n".join(blocks) if blocks else answer


def _normal(text: str) -> str:
    """A value without decoration; of several `\\boxed{...}` the last one counts."""
    boxes = list(_BOXED.finditer(text))
    if boxes:
        text = _braced(text, boxes[-1].end())
    text = _FRACTION.sub(r"(\1)/(\2)", text)
    text = _SHORT_FRACTION.sub(r"(\1)/(\2)", text)
    text = _DECORATION.sub("", text).replace("\\%", "%").replace("−", "-")
    text = _THOUSANDS.sub("", text).lower().removesuffix(".")
    return re.sub(r"\((-?\d+(?:\.\d+)?)\)", r"\1", text)


def _braced(text: str, start: int) -> str:
    """What stands before the brace that closes the one opened just before `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return text[start:]


def _number(text: str) -> Fraction | None:
    """A plain number, a fraction of two or a percentage; None for anything else."""
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
