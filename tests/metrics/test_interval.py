"""Intervals of means: how often they cover the true mean, and their values by hand."""

import math

import numpy as np
import pytest

from selfplay.evaluation.report import Evaluated, lost_together, lost_with_strangers
from selfplay.evaluation.rows import Row
from selfplay.evaluation.tables import mean_interval, paired_change, paired_interval

# Scores with their numbers of games, rounded to two decimals (changes to one).
FAILS_ONE_IN_100 = {0.0: 1, 1.0: 99}
PEOPLE_ON_THE_FULL_GAME = {  # 67 recorded games of matching
    0.72: 1, 0.74: 1, 0.75: 2, 0.78: 2, 0.79: 1, 0.8: 2, 0.82: 1, 0.83: 2, 0.85: 1, 0.86: 1,
    0.87: 1, 0.88: 3, 0.89: 4, 0.9: 3, 0.91: 2, 0.92: 1, 0.93: 1, 0.95: 1, 0.96: 2, 0.97: 4,
    0.98: 3, 0.99: 9, 1.0: 19,
}  # fmt: skip
POLICY_ON_SMALL_BOARDS = {  # 512 games after self-play
    0.0: 1, 0.22: 1, 0.25: 1, 0.33: 2, 0.36: 1, 0.4: 1, 0.43: 1, 0.44: 1, 0.45: 1, 0.5: 5,
    0.53: 1, 0.56: 1, 0.57: 2, 1.0: 493,
}  # fmt: skip
CHANGE_ON_SMALL_BOARDS = {  # the same games, after minus before
    -1.0: 1, -0.8: 1, -0.7: 2, -0.6: 1, -0.5: 4, -0.4: 3, 0.0: 416, 0.4: 5, 0.5: 14, 0.6: 9,
    0.7: 7, 0.8: 13, 0.9: 5, 1.0: 31,
}  # fmt: skip


@pytest.mark.parametrize("num_games", [16, 64, 256])
@pytest.mark.parametrize(
    ("games", "lowest"),
    [
        (FAILS_ONE_IN_100, 0.0),
        (PEOPLE_ON_THE_FULL_GAME, 0.0),
        (POLICY_ON_SMALL_BOARDS, 0.0),
        (CHANGE_ON_SMALL_BOARDS, -1.0),
    ],
    ids=["fails_one_in_100", "people", "policy", "change"],
)
def test_an_interval_covers_the_true_mean_in_93_of_100_samples(
    games: dict[float, int], lowest: float, num_games: int
) -> None:
    every = np.repeat(list(games), list(games.values()))
    rng = np.random.default_rng(num_games)
    covered = 0
    for _ in range(100):
        _, low, high = mean_interval(rng.choice(every, num_games), lowest=lowest)
        covered += low <= every.mean() <= high
    assert covered >= 93


@pytest.mark.parametrize(("num_games", "won"), [(1, 1), (16, 0), (16, 15), (67, 66), (400, 200)])
def test_of_games_won_and_lost_it_is_the_interval_of_clopper_and_pearson(
    num_games: int, won: int
) -> None:
    from scipy.stats import beta  # 0.7 s

    mean, low, high = mean_interval([1.0] * won + [0.0] * (num_games - won))
    assert mean == won / num_games
    lost = num_games - won
    assert low == pytest.approx(beta.ppf(0.025, won, lost + 1) if won else 0, abs=0.004)
    assert high == pytest.approx(beta.ppf(0.975, won + 1, lost) if lost else 1, abs=0.004)


def test_equal_scores_have_an_interval_and_more_games_a_smaller_one() -> None:
    # If a share p of all games were below 1, n games would show none with probability (1 - p)^n.
    for num_games in (1, 16, 1024):
        mean, low, high = mean_interval([1.0] * num_games)
        assert (mean, high) == (1.0, 1.0)
        assert low == pytest.approx(0.025 ** (1 / num_games), rel=0.003)
    half = mean_interval([0.5] * 16)
    assert half[0] == 0.5 and half[1] == pytest.approx(1 - half[2]) and half[1] < 0.4


def test_an_interval_repeats_and_scales_with_its_limits() -> None:
    scores = [0.25, 0.5, 1.0, 1.0]
    assert mean_interval(scores) == mean_interval(scores[::-1])
    twice = mean_interval([2 * score - 1 for score in scores], lowest=-1.0)
    assert twice == pytest.approx(tuple(2 * end - 1 for end in mean_interval(scores)))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "at least 1 value"),
        ([0.5, 1.25], "from 0 to 1, got 1.25"),
        ([-0.5], "from 0 to 1, got -0.5"),
        ([0.5, math.nan], "from 0 to 1, got nan"),
        ([math.inf], "from 0 to 1, got inf"),
    ],
)
def test_values_outside_the_limits_have_no_interval(values: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mean_interval(values)
    rounded = mean_interval([1 + 1e-12, 0.0])
    assert rounded[1:] == mean_interval([1.0, 0.0])[1:]


def row_of(scores: list[float], **measures: float) -> Row:
    return Row("p", tuple(scores), mean_interval(scores), measures)


def test_a_change_is_paired_on_the_games() -> None:
    # Games differ by 0.5 from each other, and each gains 0.1: unpaired intervals overlap.
    before, after = row_of([0.2, 0.7] * 50), row_of([0.3, 0.8] * 50)
    assert before.interval[2] > after.interval[1]
    change = paired_change(before, after)
    assert change and change[0] == pytest.approx(0.1) and 0.05 < change[1] < change[2] < 0.14
    assert paired_change(before, row_of([0.2] * 99)) is None


def test_games_are_not_paired_where_some_were_aborted() -> None:
    """Instances score 0.1, 0.5, 0.9 in both rows, but the first lacks one row, the last the other:
    by place they would differ by 0.4 each."""
    rows = [row_of(scores, num_void=1.0) for scores in ([0.5, 0.9], [0.1, 0.5])]
    assert paired_change(*rows) is None
    assert paired_change(row_of([0.5, 0.9]), rows[1]) is None
    cells = {"a": rows[0], "b": rows[0], "a with b": rows[1], "b with a": rows[1]}
    report = Evaluated("t", {}, cells, (("a", "b"), ("a", "b")))
    assert lost_together(report) == {} and lost_with_strangers(report) is None


def test_of_few_differences_apart_from_the_commonest_the_limits_count() -> None:
    """One of 64 says nothing of the others' size, nor does a constant rise; noise of sums does not
    set differences apart. With 20 apart the size of the differences counts."""
    for few in ([0.1] + [0.0] * 63, [0.1] * 64, [0.1 + 1e-15 * i for i in range(64)]):
        assert paired_interval(few) == mean_interval(few, lowest=-1.0)
    widths = []
    for num in (5, 19, 20, 21):
        some = [0.1, -0.1] * (num // 2) + [0.1] * (num % 2) + [0.0] * (64 - num)
        (_, low, high), (_, lowest, highest) = paired_interval(some), mean_interval(some, lowest=-1)
        widths.append((high - low) / (highest - lowest))
    assert widths[0] == 1.0 and widths[1] == pytest.approx(widths[2], rel=0.1), "no jump at 20"
    assert max(widths[1:]) < 0.4


def test_paired_differences_are_alike_either_way_and_scale() -> None:
    differences = [0.01 * i for i in range(-20, 45)]
    mean, low, high = paired_interval(differences)
    assert mean == pytest.approx(0.12) and low < mean < high
    back = paired_interval([-one for one in differences])
    assert back == pytest.approx((-mean, -high, -low), abs=0.02 * (high - low))
    half = paired_interval([one / 2 for one in differences])
    assert half == pytest.approx((mean / 2, low / 2, high / 2))
    # A t interval: 0.12 +- 1.998 * 0.189 / sqrt(65).
    assert 1.0 < (high - low) / (2 * 1.998 * 0.189 / math.sqrt(65)) < 1.5


@pytest.mark.parametrize("values", [[], [1.25], [-1.5, 0.0], [math.nan], [0.0, math.inf]])
def test_differences_outside_the_limits_have_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1 value|from -1 to 1"):
        paired_interval(values)
