"""Self-play of a table: its gradient, and what each rule can and cannot reach in Kuhn poker."""

import numpy as np
import pytest

from bench.policy_table import GAME, exploitability, gradient, softmax
from dialop.kit import load_kit
from dialop.tree import Tree, tree_of, values_of


def kuhn() -> Tree:
    kit = load_kit(str(GAME))
    return tree_of(kit, kit.Options())


def test_its_gradient_is_the_slope_of_what_the_mover_is_paid() -> None:
    """By differences of exact values, for each logit of a random table."""
    tree = kuhn()
    logits = np.random.default_rng(0).normal(0.0, 1.0, (len(tree.sets), 2))
    slopes, often = gradient(tree, softmax(logits))
    begins = [not info.path for info in tree.sets]
    assert often[begins].sum() == pytest.approx(1.0), "each game begins with one of three cards"
    for at, info in enumerate(tree.sets):
        for move in range(2):
            paid = []
            for change in (-1e-5, 1e-5):
                moved = logits.copy()
                moved[at, move] += change
                paid.append(values_of(tree, softmax(moved).tolist()).own[info.seat])
            assert slopes[at, move] == pytest.approx((paid[1] - paid[0]) / 2e-5, abs=1e-8)


@pytest.mark.slow
def test_a_moving_reference_and_a_falling_bonus_go_below_what_a_fixed_one_leaves() -> None:
    """After 3,000 steps, seed 0."""
    left = {
        rule: exploitability(kuhn(), rule, steps=3000, seed=0)[-1]
        for rule in ("fixed", "moving", "entropy", "falling")
    }
    assert min(left["fixed"], left["entropy"]) > 0.05 > 0.04 > max(left["moving"], left["falling"])
