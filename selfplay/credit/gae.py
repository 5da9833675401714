"""Generalised advantage estimation over a seat's own tokens, and how well values foretell returns.

A step is a token that the seat's policy sampled. What the other seat says and what the rules answer
happens between two steps: it is seen by the next value and is no step itself, so neither the
discount nor the trace runs over it. Rewards in the reward's units; floats only, no torch.

Shapes: K trained tokens of one transcript, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from selfplay.credit.sample import Sample


def gae(
    rewards_K: Sequence[float], values_K: Sequence[float], *, gamma: float, lam: float
) -> list[float]:
    """Advantages of one transcript, arXiv 1506.02438 eq. 16.

    With d_k = r_k + gamma V_{k+1} - V_k, the advantage is the sum over l of (gamma lam)^l d_{k+l}.
    `values_K` are those of the states before each token; after the last one the game is over, and
    its value is 0.
    """
    advantages = [0.0] * len(values_K)
    following, next_value = 0.0, 0.0
    for k in reversed(range(len(values_K))):
        delta = rewards_K[k] + gamma * next_value - values_K[k]
        following = delta + gamma * lam * following
        advantages[k] = following
        next_value = values_K[k]
    return advantages


def with_gae(sample: Sample, values: Sequence[float], *, gamma: float, lam: float) -> Sample:
    """The sample with its trained tokens' advantages, the critic's values and what it is to learn.

    `values` has one entry a token and is read where the mask is 1. A value's target is advantage +
    value, the lambda-return.
    """
    places, rewards = [p for p, m in enumerate(sample.mask) if m], sample.token_rewards()
    advantages_K = gae(
        [rewards[place] for place in places],
        [values[place] for place in places],
        gamma=gamma,
        lam=lam,
    )
    advantages, returns = ([0.0] * len(sample.ids) for _ in range(2))
    for place, advantage in zip(places, advantages_K, strict=True):
        advantages[place] = advantage
        returns[place] = advantage + values[place]
    return replace(sample, advantages=advantages, values=list(values), returns=returns)
