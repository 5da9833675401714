"""How exploitable self-play of Kuhn poker leaves a policy that is a table, by what it learns with.

    python -m bench.policy_table [--steps 6000] [--seeds 3]

Each step adds the policy gradient of every information set, as often as play leads there, with the
noise of a sample, to the logits of its moves. A row has one of

    fixed      -0.3 KL to the policy at the start
    moving     -0.3 KL to a reference that becomes the policy after each eighth of the steps
    entropy    0.3 times the entropy over the moves
    falling    the same with a weight that falls to 0 at the last step

and may have

    pool       half of the games are with an earlier policy, one of up to 100, drawn uniformly
    league     half of them, with one drawn by what the policy lost to it (power 2, as `league`)
    back       when exploitability is 0.1 above its least, all goes back to where it was least

Prints exploitability after each sixth of the steps, the worst of the last 64 of 300 evaluations,
and that of the realisation-weighted average of the second half, a line for each seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.rows import count
from dialop.kit import load_kit
from dialop.tree import Average, Payoffs, Position, Tree, tree_of, values_of

GAME = Path(__file__).resolve().parents[1] / "examples/kuhn/kuhn.py"
RULES = (
    *("plain", "pool", "league", "back", "fixed", "moving", "entropy", "falling"),
    *("moving back", "moving pool", "moving league"),
)
RATE, WEIGHT, NOISE, PARTS, EVALUATIONS, MEMBERS = 0.3, 0.3, 0.02, 8, 300, 100
Floats = NDArray[np.float64]


class Found(NamedTuple):
    """Exploitability at each evaluation, and that of the average of the second half."""

    curve: list[float]
    average: float


def gradient(
    tree: Tree, policy: Floats, partner: Floats | None = None
) -> tuple[Floats, Floats, float]:
    """Of what the mover of each information set is paid, by its logits [sets, moves], how often
    play leads the policy to each set [sets], and what its seats are paid, a mean.

    A partner has the policy's other seat, each in half of the games; None is self-play.
    """
    slopes, often, won = np.zeros(policy.shape), np.zeros(len(policy)), 0.0
    all_seats = tuple(range(tree.num_seats))
    seatings = [all_seats] if partner is None else [(seat,) for seat in all_seats]

    def walk(reach: float, node: Position | Payoffs, own: tuple[int, ...]) -> Floats:
        """What each seat is paid from here, if the policy has the seats `own`."""
        if not isinstance(node, Position):
            return np.array(node)
        seat = tree.sets[node.at].seat
        moves = policy[node.at] if partner is None or seat in own else partner[node.at]
        paid = np.array(
            [walk(reach * p, each, own) for p, each in zip(moves, node.after, strict=True)]
        )
        if seat in own:
            slopes[node.at] += reach * moves * (paid[:, seat] - moves @ paid[:, seat])
            often[node.at] += reach
        return moves @ paid

    for own in seatings:
        for probability, start in tree.deals:
            paid = walk(probability / len(seatings), start, own)
            won += probability / len(seatings) * float(paid[list(own)].mean())
    return slopes, often, won


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def run(tree: Tree, rule: str, *, steps: int, seed: int) -> Found:
    """Self-play under a rule, evaluated EVALUATIONS times."""
    draw, parts = np.random.default_rng(seed), rule.split()
    logits = draw.normal(0.0, 0.05, (len(tree.sets), 2))
    reference = softmax(logits)
    members, lost = list[Floats](), list[float]()  # to each: the share of the chips
    best, kept = np.inf, (logits, reference)
    curve, average = list[float](), Average()
    for step in range(steps):
        policy = softmax(logits)
        if "moving" in parts and step and step % (steps // PARTS) == 0:
            reference = policy
        slopes, often, _ = gradient(tree, policy)
        if "pool" in parts or "league" in parts:
            if step % (steps // MEMBERS) == 0:
                members.append(policy)
                lost.append(0.5)
            weights = np.square(lost) + 0.001 if "league" in parts else np.ones(len(lost))
            one = draw.choice(len(lost), p=weights / weights.sum())
            others = gradient(tree, policy, members[one])
            slopes, often = (slopes + others[0]) / 2, (often + others[1]) / 2
            lost[one] = (2 - others[2]) / 4
        slopes += draw.normal(0.0, NOISE, slopes.shape) * np.sqrt(often)[:, None]
        if {"fixed", "moving", "entropy", "falling"} & {*parts}:
            weight = WEIGHT * (1 - step / steps if "falling" in parts else 1.0)
            even = "entropy" in parts or "falling" in parts
            logs = np.log(policy / (np.full(policy.shape, 0.5) if even else reference))
            mean = (policy * logs).sum(axis=1, keepdims=True)
            slopes -= weight * often[:, None] * policy * (logs - mean)  # a KL; to even: -entropy
        logits = logits + RATE * slopes
        if (step + 1) % (steps // EVALUATIONS) == 0:
            table = softmax(logits)
            curve.append(values_of(tree, table.tolist()).exploitability)
            if step >= steps // 2:
                average.add(tree, table.tolist())
            if curve[-1] < best:
                best, kept = curve[-1], (logits, reference)
            elif "back" in parts and curve[-1] > best + 0.1:
                logits, reference = kept
    return Found(curve, values_of(tree, average.policy(tree)).exploitability)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=count, default=6000)
    parser.add_argument("--seeds", type=count, default=3)
    args = parser.parse_args(words)
    kit = load_kit(str(GAME))
    tree = tree_of(kit, kit.Options())
    for rule in RULES:
        for seed in range(args.seeds):
            curve, average = run(tree, rule, steps=args.steps, seed=seed)
            sixths = " ".join(f"{each:.3f}" for each in curve[49::50])
            print(f"{rule:18} {sixths}  worst {max(curve[-64:]):.3f}  average {average:.3f}")


if __name__ == "__main__":
    main()
