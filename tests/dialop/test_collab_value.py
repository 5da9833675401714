"""Values of answers: what is right in another writing passes, what only looks like it does not."""

import random
from dataclasses import replace

import pytest

from dialop.collab.grading import check_tasks
from dialop.collab.value import equal_values
from tests.helpers.collab_tasks import NUMBER

Pair = tuple[str, str]


def classes(table: str) -> dict[str, list[Pair]]:
    """Each class of writings, as pairs of an answer and its target."""
    found: dict[str, list[Pair]] = {}
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            found[line[:-1]] = pairs = []
        else:
            pairs += [tuple(pair.split(" ~ ")) for pair in line.strip().split(" | ")]
    return found


RIGHT = classes(r"""
decimals and fractions:
    42 ~ 42.0 | +.5 ~ 1/2 | 1e3 ~ 1000 | 5/2 ~ 2\frac12 | -2 1/2 ~ -2.5
    2.5 ~ \boxed{2\frac{1}{2}} | \frac 1{2} ~ 0.5 | \frac{14}{3} ~ 14/3
rounded fractions:
    -0.3333333 ~ -1/3 | 33.333333 ~ 100/3 | 2/7 ~ 0.285714
thousands:
    x = 1,000 ~ 1000 | 10{,}000 ~ 10000 | -1,234.5 ~ -1234.5 | 1,234,567 ~ 1234567
    10,\!000 ~ 10000 | 10\,000 ~ 10000
other characters:
    –5 ~ -5 | —5 ~ -5 | −5 ~ -5 | ½ ~ 0.5 | -¾ ~ -0.75 | 2½ ~ 2.5 | 1⁄2 ~ 1/2 | １２ ~ 12 | ٥ ~ 5
    x² ~ x^2 | 90° ~ 90
decoration:
    $12$. ~ 12 | \sqrt{2} ~ $\sqrt {2}$ | \left(3, 4\right) ~ (3,4) | \(5\) ~ 5 | \[5\] ~ 5
    **5** ~ 5 | `5` ~ 5 | \$5 ~ $5 | x^{2} ~ x^2
solutions:
    $\boxed{\dfrac{1}{2}}$ ~ 0.5 | it is 60 and 180, so \boxed{3060}. ~ 3060 | #### 72 ~ 72
    72 ~ So the answer is: 72. | The answer is $72$. ~ 72
equations:
    x = 5 ~ 5 | 5 ~ \boxed{x=5} | x=5 ~ x = 5 | 2x+3 ~ y = 2x + 3 | 2 + 3 = 5 ~ 5 | x + y = 5 ~ 5
    2 x y + 3 ~ 2xy+3 | x/2 ~ \frac{x}{2}
percent:
    50% ~ 50 | 50\% ~ 0.5 | 50 ~ 50% | 5 % ~ 5%
units:
    5\text{ cm} ~ 5 | 5 ~ 5\mathrm{cm}^2 | 90^\circ ~ 90 | 72 ~ 72 clips
    2\sqrt{3} ~ 2\sqrt{3}\text{ cm} | 72 clips ~ 72 clips | 72 clips ~ 72 | 5 cm ~ 5\text{ cm}
    90^\circ ~ 90 degrees | x = 72 red clips ~ 72 | 72.0 clips ~ 72 clips | 90 degrees ~ 90°
    18 months ~ 18
relations:
    x \ge 5 ~ x\geq 5 | x\geqslant5 ~ x ≥ 5 | x>=5 ~ x \ge 5 | a\leq b ~ a \le b | x\ne 3 ~ x ≠ 3
    x \lt 2 ~ x<2
roots:
    \sqrt 2 ~ \sqrt{2} | 3\sqrt2 ~ 3\sqrt{2} | \sqrt x ~ \sqrt{x} | √12 ~ \sqrt{12}
    \frac{\sqrt 3}{2} ~ \frac{\sqrt{3}}{2}
powers of ten:
    3\times 10^3 ~ 3000 | 3e8 ~ 3 \cdot 10^{8} | 2.5×10⁻² ~ 0.025
    3000 ~ y = 3 \times 10^{3}\text{ m} | -1,200 * 10^1 ~ -12000
words:
    Friday ~ \boxed{\text{Friday}} | \text{C} ~ \textbf{(C)} | c ~ (C) | 5 or 6 ~ 5\text{ or }6
    (3, 4) ~ (3,4) | 3,4 ~ 3, 4
""")
RIGHT["thousands"] += [(" 1,234 ", "1234")]
RIGHT["other characters"] += [("5\u00a0％", "5%")]
GSM8K = "She has 70 + 2 = <<70+2=72>>72 clips.\n#### "
RIGHT["solutions"] += [(said, GSM8K + said.lstrip("$")) for said in ("72", "1,072", "-72", "$72")]
WRONG = classes(r"""
numbers that a blank separates:
    1 2 ~ 12 | 12 ~ 1 2 | 1\,2 ~ 12 | 1$2 ~ 12 | 1. 2 ~ 1.2 | 1 2/3 ~ 12/3 | 1, 100 ~ 1100
    12 ~ \text{1}2 | 1 2 ~ 3
numbers that brackets or signs separate:
    100 ~ (0,100) | (1,100) ~ 1100 | \{1,100\} ~ 1100 | 0,100 ~ 100 | 2(3) ~ 23 | (1)(2) ~ 12
    1/21/2 ~ \frac12\frac12 | 2 1/2.5 ~ 2 | 1:2 ~ 12 | 1_000 ~ 1000 | 12,345,6 ~ 123456
    5^\circ6 ~ 56 | 5² ~ 52
numbers that words separate:
    56 ~ 5\text{ or }6 | 5\text{ or 6} ~ 5 | 5\text{ or six} ~ 5 | 5\text{ million} ~ 5 | 5 pi ~ 5
    7 or 8 ~ 7 | 7 or 8 ~ 8
units:
    5\text{ m} ~ 5\text{ cm} | 5^2 ~ 5\text{ cm}^2 | 5 ~ 5 million | 5\text{ half} ~ 5
    5\mathrm{i} ~ 5 | 5 ~ 5\mathrm{i} | 5\text{e} ~ 5 | 5\text{ thirds} ~ 5 | 5 tenths ~ 5
    5\text{ factorial} ~ 5 | 5 halves ~ 5 | 5 feet ~ 5\text{ m} | 5 cats ~ 5 dogs | 5 million ~ 5
    5 or so ~ 5
relations, roots and powers:
    x>5 ~ x\ge 5 | x \le 5 ~ x \ge 5 | 5 ~ x \ge 5 | x=5 ~ x\ne5 | \sqrt 23 ~ \sqrt{23}
    \sqrt{2} ~ 2 | √1 2 ~ √12 | \neg x ~ !=gx | 3\times 10^3 ~ 3 | 3\times 10^{-3} ~ 3000
    3\times 4 ~ 12 | 310^3 ~ 3000
close numbers:
    1234568 ~ 1234567 | 1234567.4 ~ 1234567 | 3333333 ~ 10000000/3 | 0.333 ~ 1/3
    0.0000012 ~ 0.000001 | 0.99999999 ~ 1 | 10.5 ~ 2\frac{1}{2}
equations:
    x=4 or x=5 ~ 5 | x=4, x=5 ~ 5 | 4=5 ~ 5 | x!=5 ~ 5 | x>=5 ~ 5 | y=5 ~ x=5 | x ~ x=5=5
    5 ~ x+y=5
percent:
    0.5% ~ 0.5 | 50% ~ 5000% | 0.5 ~ 50
signs, arrows and words:
    -3 ~ 3 | ±5 ~ 5 | f(x) ~ fx | no x ~ nox | x 2 ~ x2 | (x)(y) ~ xy | an x ~ anx
    x\rightarrow y ~ x\leftarrow y | 5! ~ 5 | no ~ on | \text{Monday} ~ \text{Friday} | 3+4 ~ 7
    (3,4) ~ (4,3) | (0,1) ~ [0,1]
nothing:
    $$ ~ $ | 1/0 ~ 2 | . ~ 0
""")
WRONG["numbers that a blank separates"] += [("1\n2", "12")]
WRONG["nothing"] += [("", ""), ("9" * 500, "9")]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_value_in_another_writing_passes(name: str) -> None:
    refused = [pair for pair in RIGHT[name] if not equal_values(*pair)]
    assert not refused
    assert all(equal_values(target, target) for _, target in RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_near_miss_does_not_pass(name: str) -> None:
    passed = [pair for pair in WRONG[name] if equal_values(*pair)]
    assert not passed


# What can stand between two digits; "," and "." could make the same or another number.
BETWEEN = (
    *" \n\u00a0~$;:|()[]{}^°!=%*`-–/_½²₂'x",
    *("\\ ", "\\;", "\\,", "\\{", "\\quad ", "\\left", "\\displaystyle", "\\frac12"),
    *("\\text{x}", "\\text{ or }", " and ", ", ", "..", "####"),
)


def test_a_number_that_is_cut_anywhere_by_anything_is_another() -> None:
    draw = random.Random(0)
    for between in BETWEEN:
        for _ in range(20):
            number = str(draw.randrange(10, 10**9)) + draw.choice(("", ".5"))
            cut = draw.randrange(1, len(number.partition(".")[0]))
            answer = number[:cut] + between + number[cut:]
            same = between == "\\," and answer.replace(between, ",") == f"{float(number):,g}"
            assert equal_values(answer, number) == same, (answer, number)
            assert equal_values(number, answer) == same, (number, answer)


@pytest.mark.parametrize(
    "target",
    [
        *("She has 72 clips.", "70 + 2 = 72,\nso 72 in all", "$$", "\\boxed{}", "x" * 200),
        *("N/A", "n.a.", " NaN", "null", "\\text{N/A}", "\\boxed{?}", "#### unknown", "...", "-"),
    ],
)
def test_a_target_without_a_value_is_refused(target: str) -> None:
    """Every answer to it would be wrong."""
    with pytest.raises(ValueError, match=r"row 3: the target .* must be a value, .* got"):
        check_tasks([("row 3", replace(NUMBER, target=target))])


def test_a_target_in_words_is_a_value() -> None:
    for target in ("Friday", "1 hour and 30 minutes", "\\text{all real numbers except } 3"):
        check_tasks([("row 3", replace(NUMBER, target=target))])


def test_a_reference_text_that_only_says_there_is_none_is_refused() -> None:
    rule = r"^row 3: the target of a writing task must be a text, got 'N/A'$"
    with pytest.raises(ValueError, match=rule):
        check_tasks([("row 3", replace(NUMBER, task="writing", target="N/A"))])
    for target in ("None of them.", "n", "An unknown owl."):
        check_tasks([("row 3", replace(NUMBER, task="writing", target=target))])
