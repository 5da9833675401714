"""Self-play of a table: its gradient, and what each rule can and cannot reach in Kuhn poker."""

import numpy as np
import pytest

from bench.policy_table import GAME, Floats, gradient, run, softmax
from dialop.kit import load_kit
from dialop.tree import Tree, tree_of, values_of


def kuhn() -> Tree:
    kit = load_kit(str(GAME))
    return tree_of(kit, kit.Options())


def test_its_gradient_is_the_slope_of_what_the_mover_is_paid() -> None:
    """By differences of exact values, for each logit of a random table; with a partner, too, whose
    own seat the policy has in the other half of the games."""
    tree, draw = kuhn(), np.random.default_rng(0)
    logits, others = (draw.normal(0.0, 1.0, (len(tree.sets), 2)) for _ in range(2))
    partner = softmax(others)
    slopes, often, paid_self = gradient(tree, softmax(logits))
    halves, half_often, won = gradient(tree, softmax(logits), partner)
    begins = [not info.path for info in tree.sets]
    assert often[begins].sum() == pytest.approx(1.0), "each game begins with one of three cards"
    assert half_often[begins].sum() == pytest.approx(0.5), "the policy begins half of the games"
    assert paid_self == pytest.approx(0.0)
    with_partner = [against(tree, softmax(logits), partner, seat) for seat in (0, 1)]
    assert won == pytest.approx(sum(with_partner) / 2)
    for at, info in enumerate(tree.sets):
        for move in range(2):
            alone, two = list[float](), list[float]()
            for change in (-1e-5, 1e-5):
                moved = logits.copy()
                moved[at, move] += change
                alone.append(values_of(tree, softmax(moved).tolist()).own[info.seat])
                two.append(against(tree, softmax(moved), partner, info.seat))
            assert slopes[at, move] == pytest.approx((alone[1] - alone[0]) / 2e-5, abs=1e-8)
            assert halves[at, move] == pytest.approx((two[1] - two[0]) / 4e-5, abs=1e-8)


def against(tree: Tree, policy: Floats, partner: Floats, seat: int) -> float:
    """What a policy is paid in a seat, if a partner has the other."""
    own = np.array([info.seat == seat for info in tree.sets])
    return values_of(tree, np.where(own[:, None], policy, partner).tolist()).own[seat]


@pytest.mark.slow
def test_a_moving_reference_and_a_falling_bonus_go_below_what_a_fixed_one_leaves() -> None:
    """After 6,000 steps, seed 0. A league does not do it alone, and does not spoil it."""
    rules = ("fixed", "entropy", "league", "moving", "falling", "moving league")
    left = {rule: run(kuhn(), rule, steps=6000, seed=0).curve[-1] for rule in rules}
    above = min(left[rule] for rule in rules[:3])
    assert above > 0.05 > 0.03 > max(left[rule] for rule in rules[3:])


@pytest.mark.slow
def test_what_goes_back_stays_within_a_tenth_of_its_best() -> None:
    """Plain play circles farther away for evaluations in a row, seed 0."""
    lasts = []
    for rule in ("plain", "back"):
        curve = np.array(run(kuhn(), rule, steps=6000, seed=0).curve)
        far = curve > np.minimum.accumulate(curve) + 0.1
        lasts.append((far[1:] & far[:-1]).any())
    assert lasts == [True, False]
