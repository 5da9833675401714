"""Generated instances: distribution, filter, and dependence on seed and index only."""

import statistics
from dataclasses import replace
from itertools import permutations

import pytest

from dialop.kit import load_kit
from dialop.matching.game import MatchingInstance
from dialop.matching.generate import MatchingRecipe, generate_instance
from tests.helpers.dialop_boards import full_boards

generate = load_kit("matching").generate

TINY = MatchingRecipe(size=2, p_observed=0.5, scale=False, max_value=10, keep="exactly_one")
SMALL = MatchingRecipe(size=3, p_observed=0.5, scale=False, max_value=10)


def brute_best(instance: MatchingInstance) -> int:
    table = instance.table
    return max(
        sum(table[r][p] for r, p in enumerate(papers)) for papers in permutations(range(len(table)))
    )


def test_the_full_game_has_the_specified_figures() -> None:
    instances = full_boards()
    best = [float(i.best) for i in instances]
    solo = [i.norm(s) for i in instances for s in i.solo]
    better = [i.norm(max(i.solo)) for i in instances]
    own = [sum(map(sum, mask)) for i in instances for mask in i.masks]
    union = [
        sum(a or b for rows in zip(*i.masks, strict=True) for a, b in zip(*rows, strict=True))
        for i in instances
    ]
    # Tolerances are about four standard errors of a sample of 40.
    assert statistics.fmean(best) == pytest.approx(609, abs=28)
    assert statistics.stdev(best) == pytest.approx(44, abs=20)
    assert statistics.fmean(own) == pytest.approx(24.5, abs=1.8)
    assert statistics.fmean(union) == pytest.approx(40.8, abs=2.1)
    assert statistics.fmean(solo) == pytest.approx(0.774, abs=0.017)
    assert statistics.fmean(better) == pytest.approx(0.790, abs=0.017)
    scales = [scale for i in instances for scale in i.scales]
    assert min(scales) >= 1 and max(scales) <= 10
    assert statistics.fmean(scales) == pytest.approx(5.5, abs=1.15)
    assert sum(i.first_seat for i in instances) == 20


@pytest.mark.parametrize(("recipe", "num_failing"), [(TINY, 1), (SMALL, 2)])
def test_kept_boards_fail_the_right_number_of_solo_plans(
    recipe: MatchingRecipe, num_failing: int
) -> None:
    for instance in generate(recipe, seed=2, num=60):
        assert instance.best == brute_best(instance)
        assert sum(s * recipe.hardness < instance.best for s in instance.solo) == num_failing
        assert instance.scales == (1.0, 1.0) and instance.unknown == 5
        assert all(0 <= cell < 10 for row in instance.table for cell in row)
        for r in range(recipe.size):
            for p in range(recipe.size):
                if not any(mask[r][p] for mask in instance.masks):
                    assert instance.table[r][p] == 5


def test_an_unfiltered_stream_keeps_its_first_table_and_the_cap_ends_the_search() -> None:
    impossible = MatchingRecipe(size=3, hardness=1000.0, max_tables=0)
    unfiltered = MatchingRecipe(size=3, keep="all")
    for index in range(5):
        capped = generate_instance(impossible, seed=3, index=index)
        assert capped == generate_instance(unfiltered, seed=3, index=index)
    # A cap of n takes table n of the stream, also across the borders of blocks.
    tables = {
        num: generate_instance(replace(impossible, max_tables=num), seed=3, index=0).table
        for num in (0, 1, 15, 16, 17, 47, 48, 100)
    }
    assert len(set(tables.values())) == len(tables)


def test_the_stream_of_a_seed_does_not_change() -> None:
    instance = generate_instance(TINY, seed=1, index=0)
    assert instance.table == ((5, 9), (0, 9))
    assert instance.masks == (((0, 1), (0, 1)), ((0, 0), (1, 0)))
    assert (instance.best, instance.solo, instance.first_seat) == (14, (9.0, 14.0), 1)


def test_large_values_do_not_overflow() -> None:
    recipe = MatchingRecipe(size=8, max_value=10_000, keep="all")
    instance = generate_instance(recipe, seed=1, index=0)
    assert instance.best > 8 * 5_000 and instance.unknown == 5_000


def test_split_rows_show_each_row_to_one_seat() -> None:
    recipe = MatchingRecipe(size=3, split_rows=True, keep="all")
    rows = [board.masks for board in generate(recipe, seed=4, num=60)]
    assert all({sum(row) for row in mask} <= {0, 3} for masks in rows for mask in masks)
    seen = [tuple(sum(row) > 0 for row in masks[0]) for masks in rows]
    assert {sum(mask) for mask in seen} == {2} and len(set(seen)) == 3
    for first, second in rows:
        assert all(
            a + b == 1
            for r, s in zip(first, second, strict=True)
            for a, b in zip(r, s, strict=True)
        )


def test_skewed_values_and_weak_mean_plans() -> None:
    """A value is at least v with probability 1 - (v / 10)^(1 / 3)."""
    recipe = MatchingRecipe(size=4, max_value=10, skew=3.0, p_observed=1.0, keep="all")
    values = [v for b in generate(recipe, seed=4, num=250) for row in b.table for v in row]
    for least in (1, 5, 9):
        share = statistics.fmean(value >= least for value in values)
        assert share == pytest.approx(1 - (least / 10) ** (1 / 3), abs=0.03)  # four errors
    weak = replace(recipe, keep="random", hardness=2.0)
    for board in generate(weak, seed=4, num=60):
        plans = [sum(board.table[r][p] for r, p in enumerate(c)) for c in permutations(range(4))]
        assert statistics.fmean(plans) * 2.0 < max(plans) == board.best
