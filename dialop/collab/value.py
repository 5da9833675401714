"""Whether two answers to a mathematics task have the same value.

A policy exploits whatever a grader accepts, so nothing is deleted between two characters: text
without value becomes a blank, and numbers separated by a blank or a word stay separate. Expressions
are not evaluated. docs/notes/log.md compares this with math-verify.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

# What precedes the value of a published solution.
_FINAL = re.compile(r"####|\banswer(?: is|:)\s*:?", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
# Around a value in LaTeX.
_DECORATION = re.compile(r"\\(?:left|right|displaystyle|q?quad)(?![A-Za-z])|\\[,;: ()[\]$]|[$~\s]")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox|mathrm) ?\{([^{}]*)\}")
_UNIT = re.compile(
    rf"(?:°|\^ ?(?:\{{ ?)?\\circ(?: ?\}})?|{_TEXT.pattern}(?: ?\^ ?\{{?[23]\}}?)?) ?\Z"
)
_WORD_UNIT = re.compile(r"(?<=[\d%])(?: [a-z]{2,12}){1,3}\Z")
# Words that change a value or start another one.
_NO_UNIT = re.compile(
    r"\d|\b(?:and|or|not|to|than|[eixyz]|pi|squared|cubed|factorial|percent|dozen|hundred|thousand"
    r"|\w*illion|half|halves|third|quarter|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)th)"
    r"s?\b"
)
_RELATION = re.compile(r"\\?((?<=\\)(?:[gl]eqslant|[gln]eq?|[gl]t)(?![a-z])|[≥≤≠])")
_SIGNS = {"g": ">", "l": "<", "n": "!", "≥": ">", "≤": "<", "≠": "!"}
_ROOT = re.compile(r"\\sqrt ?([a-z\d])|√ ?(\d+|[a-z])")  # TeX's root has one digit or letter
_POWER = re.compile(r"(?:\\times|\\cdot|[×·*]) ?10\^(?:\{([-+]?\d{1,3})\}|(\d))\Z")  # x 10^3
_MISSING = re.compile(r"n[/.]?a|nan|null|tbd|unknown|[?.…\-_ ]*")
_PART = r" ?(?:\{([^{}]+)\}|(\d))"
_FRACTION = re.compile(rf"(?:(?<![\w.,/])(\d+) ?)?\\[dt]?frac{_PART}{_PART}")
_MIXED = re.compile(r"(?<![\w.,/])(\d+) (\d+) ?/ ?(\d+)(?![\w.,/(])")  # 2 1/2
_GROUPED = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?![\w,])")  # 1,234
_BRACKET = re.compile(r"(?<!\w)[({\[]")
# Blanks that separate nothing: not next to words or numbers, or before a variable (2 x is 2x).
_BLANK = re.compile(r"(?<![\w.]) | (?![\w.])|(?<![a-z][a-z]) (?=[a-z](?![a-z\d]))")
_ALONE = re.compile(r"(?<![\w)}])\((-?\d+(?:\.\d+)?|[a-z])\)(?![\w({.])")
_SUPERSCRIPTS = re.compile("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_EQUAL = re.compile(r"(?<![<>!:=])=(?!=)")
_SEVERAL = re.compile(r"[,;]|\b(?:and|or|not)\b")
_NAME = re.compile(r"[a-z]\w*")  # of a value, as in x=5
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?")
_MAX_DIGITS = 400  # no real answer is longer, and arithmetic on longer numbers is slow
_TOLERANCE = Fraction(1, 10**6)
_MAX_TARGET = 100  # characters of a value in words
_SENTENCE = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,} (?=.*\d)(?=.*[A-Za-z]{2})")  # around a number


def equal_values(answer: str, target: str) -> bool:
    """Whether two answers have the same value.

    Numbers must be equal. A fraction that no decimal equals may be rounded by at most 1e-6, times
    its size if that is below 1. Other texts must be equal after decoration is removed (LaTeX
    spacing, dollar signs, thousands separators, a final dot, case, parentheses around a single
    letter). One of them may lack the unit, or a percent sign if the number is above 1. If a text
    contains `\\boxed{...}`, `####` or "the answer is", as published solutions do, only the content
    of the last box or the text after it counts.
    """
    (one, unit), (other, other_unit) = _read(answer), _read(target)
    if unit and other_unit and unit != other_unit:
        return False
    if "=" not in other:
        one = _result(one)
    elif "=" not in one:
        name, _, value = other.partition("=")
        other = value if "=" not in value and _NAME.fullmatch(name) else other
    if one == other:
        return bool(one)
    (one, word), (other, other_word) = _without_words(one), _without_words(other)
    units = {each for each in (unit or word, other_unit or other_word) if each}
    if word and len(units) > 1:
        return False
    if one.endswith("%") and other.endswith("%"):
        one, other = one[:-1], other[:-1]
    if _close(_number(one), _number(other)):
        return True
    a, b = (_number(text.removesuffix("%")) for text in (one, other))
    return a is not None and a > 1 and _close(a, b)  # 50 and 50 % are both used for a half


def _without_words(text: str) -> tuple[str, str]:
    """A number without the words after it, and the words if they are a unit ("" otherwise)."""
    words = _WORD_UNIT.search(text)
    if words is None or _NO_UNIT.search(words[0]):
        return text, ""
    unit = words[0].strip()
    return text[: words.start()], "°" if unit in ("degree", "degrees") else unit


def is_missing(target: str) -> bool:
    """Whether a target only says that it is missing, such as N/A."""
    return _MISSING.fullmatch(target.strip().lower().removesuffix(".")) is not None


def is_number(text: str) -> bool:
    """Whether a text is a number, possibly with decoration, or a solution that ends in one."""
    return _number(_read(text)[0]) is not None


def is_boxed(text: str) -> bool:
    """Whether a text contains `\\boxed{...}`."""
    return _BOXED.search(text) is not None


def check_target(target: str) -> None:
    """Raise ValueError if a target has no value, so that every answer would be wrong."""
    value, plain = _read(target)[0], _TEXT.sub("", target).strip()
    prose = len(value) > _MAX_TARGET or "\n" in plain or _SENTENCE.match(plain)
    if not value or is_missing(value) or (prose and not is_boxed(target) and not is_number(target)):
        raise ValueError(
            "the target of a math task must be a value, or end in \\boxed{value} or #### value, "
            f"got {target[-60:]!r}"
        )


def _read(text: str) -> tuple[str, str]:
    """The value in plain characters without decoration, and its unit ("" if it has none)."""
    if boxes := list(_BOXED.finditer(text)):
        text = _braced(text, boxes[-1].end())
    else:
        text = _FINAL.split(text)[-1]
    text = _plain_characters(text).replace("\\!", "").replace("{,}", ",").replace("\\%", "%")
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", ",", text)
    text = " ".join(_DECORATION.sub(" ", text.strip("*` \n")).lower().split())
    text = text.removesuffix(".").rstrip()
    unit, found = "", _UNIT.search(text)
    if found and text[: found.start()].strip() and not _NO_UNIT.search(found[1] or ""):
        text, unit = text[: found.start()].rstrip(), (found[1] or "°").strip(" .")
    text = " ".join(_TEXT.sub(r" \1 ", text).split())
    text = _RELATION.sub(lambda m: _SIGNS[m[1][0]] + "=" * (m[1] not in ("gt", "lt")), text)
    text = _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2]}}}", text)
    text = _MIXED.sub(lambda m: _improper(*m.groups()), text)
    text = _FRACTION.sub(lambda m: _improper(m[1] or "", m[2] or m[3], m[4] or m[5]), text)
    if not _BRACKET.search(text):
        text = _GROUPED.sub(lambda m: m[0].replace(",", ""), text)
    text = _ALONE.sub(r"\1", _BLANK.sub("", text))
    return re.sub(r"\^\{(\w)\}", r"^\1", text), unit


def _plain_characters(text: str) -> str:
    """Unicode digits, fractions, exponents and dashes as plain characters: ５, ½, ², –."""
    if text.isascii():
        return text
    text = _SUPERSCRIPTS.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    plain = []
    for character in text:
        kind = unicodedata.decomposition(character).partition(" ")[0]
        if unicodedata.category(character) == "Pd" or character == "−":
            character = "-"
        elif kind == "<fraction>":
            character = f" {unicodedata.normalize('NFKC', character)} "
        elif kind not in ("<super>", "<sub>"):
            character = unicodedata.normalize("NFKC", character)
        plain.append("" if unicodedata.category(character[:1] or "-") == "Cf" else character)
    return "".join(plain).replace("−", "-").replace("⁄", "/").replace("∕", "/")


def _improper(whole: str, above: str, below: str) -> str:
    """The fraction of a mixed number; for other parts, their quotient as written."""
    digits = (whole, above.strip(), below.strip())
    if whole and all(part.isdecimal() and len(part) <= _MAX_DIGITS for part in digits):
        above, whole = str(int(whole) * int(digits[2]) + int(digits[1])), ""
    return f"{whole}({above})/({below})"


def _braced(text: str, start: int) -> str:
    """The text from `start` up to the brace that matches the one just before `start`."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return text[start:]


def _result(text: str) -> str:
    """The last part of "x=5" or "2+3=5"; the whole text if it lists several or is contradictory."""
    *parts, last = _EQUAL.split(text)
    several = any(map(_SEVERAL.search, parts))
    return text if several or set(map(_number, parts)) - {None, _number(last)} else last


def _close(a: Fraction | None, b: Fraction | None) -> bool:
    """Whether two numbers are equal, or one is the rounded decimal of a non-decimal fraction."""
    if a is None or b is None or a == b or _is_decimal(a) == _is_decimal(b):
        return a is not None and a == b
    return abs(a - b) <= _TOLERANCE * min(Fraction(1), max(abs(a), abs(b)))


def _is_decimal(value: Fraction) -> bool:
    """Whether a finite decimal equals the value: its denominator divides a power of ten."""
    below = value.denominator
    return pow(10, below.bit_length(), below) == 0 if below > 1 else True


def _number(text: str) -> Fraction | None:
    """The value of a plain number, a fraction or a percentage; None for any other text."""
    if len(text) > _MAX_DIGITS:
        return None
    share = text.removesuffix("%")
    above, slash, below = share.partition("/")
    parts = [_POWER.sub(r"e\1\2", part) for part in (above, below) if part or slash]
    if not parts or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    value = Fraction(parts[0])
    if slash:
        if Fraction(parts[1]) == 0:
            return None
        value /= Fraction(parts[1])
    return value / 100 if share != text else value
