"""A transcript with an advantage for each token, ready for the update: what credit hands on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A seat's transcript ready for the update: one entry a token in every list.

    Advantages are 0 where the mask is 0. `old_logprobs` are the engine's, under the sampling
    temperature. `name` says where it came from.
    """

    name: str
    ids: list[int]
    mask: list[int]
    old_logprobs: list[float]
    advantages: list[float]
