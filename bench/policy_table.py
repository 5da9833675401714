"""How exploitable self-play of Kuhn poker leaves a policy that is a table, by what keeps it mixed.

    python -m bench.policy_table [--steps 6000] [--seeds 3]

Each step adds the policy gradient of every information set, as often as play leads there, with the
noise of a sample, to the logits of its moves. The rules add to it the gradient of

    plain      nothing
    fixed      -0.3 KL to the policy at the start
    moving     -0.3 KL to a reference that becomes the policy after each quarter of the steps
    entropy    0.3 times the entropy over the moves
    falling    the same with a weight that falls to 0 at the last step

Prints exploitability after each sixth of the steps, a line for each seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dialop.kit import load_kit
from dialop.tree import Payoffs, Position, Tree, tree_of, values_of

GAME = Path(__file__).resolve().parents[1] / "examples/kuhn/kuhn.py"
RULES = ("plain", "fixed", "moving", "entropy", "falling")
RATE, WEIGHT, NOISE, PARTS = 0.3, 0.3, 0.02, 4
Floats = NDArray[np.float64]


def gradient(tree: Tree, policy: Floats) -> tuple[Floats, Floats]:
    """Of what the mover of each information set is paid, by its logits [sets, moves], and how often
    play leads to each set [sets]."""
    slopes, often = np.zeros(policy.shape), np.zeros(len(policy))

    def walk(reach: float, node: Position | Payoffs) -> Floats:
        """What each seat is paid from here."""
        if not isinstance(node, Position):
            return np.array(node)
        moves = policy[node.at]
        paid = np.array([walk(reach * p, each) for p, each in zip(moves, node.after, strict=True)])
        own = paid[:, tree.sets[node.at].seat]
        slopes[node.at] += reach * moves * (own - moves @ own)
        often[node.at] += reach
        return moves @ paid

    for probability, start in tree.deals:
        walk(probability, start)
    return slopes, often


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def exploitability(tree: Tree, rule: str, *, steps: int, seed: int) -> list[float]:
    """After each sixth of the steps of self-play under a rule."""
    draw, found = np.random.default_rng(seed), list[float]()
    logits = draw.normal(0.0, 0.05, (len(tree.sets), 2))
    reference = softmax(logits)
    for step in range(steps):
        policy = softmax(logits)
        if rule == "moving" and step and step % (steps // PARTS) == 0:
            reference = policy
        slopes, often = gradient(tree, policy)
        slopes += draw.normal(0.0, NOISE, slopes.shape) * np.sqrt(often)[:, None]
        if rule != "plain":
            weight = WEIGHT * (1 - step / steps if rule == "falling" else 1.0)
            to = np.full(policy.shape, 0.5) if rule in ("entropy", "falling") else reference
            logs = np.log(policy / to)  # minus the entropy is the KL to even moves
            mean = (policy * logs).sum(axis=1, keepdims=True)
            slopes -= weight * often[:, None] * policy * (logs - mean)
        logits = logits + RATE * slopes
        if (step + 1) % (steps // 6) == 0:
            found.append(values_of(tree, softmax(logits).tolist()).exploitability)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(words)
    kit = load_kit(str(GAME))
    tree = tree_of(kit, kit.Options())
    for rule in RULES:
        for seed in range(args.seeds):
            found = exploitability(tree, rule, steps=args.steps, seed=seed)
            print(f"{rule:8}", *(f"{each:.3f}" for each in found))


if __name__ == "__main__":
    main()
