"""A transcript with a reward and an advantage for each token: what credit hands to the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """A seat's transcript ready for the update: one entry a token in every list.

    Advantages are 0 where the mask is 0. `old_logprobs` are the engine's, under the sampling
    temperature. `name` says where it came from, once in a step. `rewards` hold the seat's reward at
    its last trained token; `penalties` are what single turns lost, (start, end, charge) each, and
    stand in the rewards at the turn's last token, too. `group` names the samples it is compared
    with, `role` the seat and, beside a partner, the partner. A sample whose advantages were given
    and not earned (imitation) has no group, role and rewards. `importance` weighs each trained
    token's loss where engine and trainer disagree, 0 rejects it; empty, all weigh 1. `values` are a
    critic's, of the state before each trained token, `returns` what they are to become; both empty
    without a critic.
    """

    name: str
    ids: list[int]
    mask: list[int]
    old_logprobs: list[float]
    advantages: list[float]
    rewards: list[float] = field(default_factory=list)
    penalties: tuple[tuple[int, int, float], ...] = ()
    group: str = ""
    role: str = ""
    importance: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


def trained_stretches(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges [start, end) of trained tokens, in order."""
    flags, end = bytes(mask), 0
    while (start := flags.find(1, end)) >= 0:
        end = flags.find(0, start)
        end = len(flags) if end < 0 else end
        yield start, end
