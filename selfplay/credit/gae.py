"""Generalized advantage estimation over the tokens that a seat sampled.

One time step is one sampled token. Tokens of the other seat and of the game come between two steps:
the next value is conditioned on them, but they are not steps, so neither the discount nor the trace
decays over them. Values and advantages are in the reward's units.

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
    `values_K` are the values of the states before each token. The state after the last token has
    value 0, because the game is over.
    """
    advantages_K = [0.0] * len(values_K)
    advantage, next_value = 0.0, 0.0
    for k in reversed(range(len(values_K))):
        delta = rewards_K[k] + gamma * next_value - values_K[k]
        advantage = delta + gamma * lam * advantage
        advantages_K[k] = advantage
        next_value = values_K[k]
    return advantages_K


def with_gae(sample: Sample, values: Sequence[float], *, gamma: float, lam: float) -> Sample:
    """The sample with advantages, the critic's values and the critic's targets.

    `values` has one entry per token and is read where the mask is 1. A value's target is the
    lambda-return, advantage + value.
    """
    indices, rewards = [i for i, m in enumerate(sample.mask) if m], sample.token_rewards()
    advantages_K = gae(
        [rewards[i] for i in indices], [values[i] for i in indices], gamma=gamma, lam=lam
    )
    advantages, returns = ([0.0] * len(sample.ids) for _ in range(2))
    for i, advantage in zip(indices, advantages_K, strict=True):
        advantages[i] = advantage
        returns[i] = advantage + values[i]
    return replace(sample, advantages=advantages, values=list(values), returns=returns)
