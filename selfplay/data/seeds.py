"""Named seeds: every random draw of a run is a function of its name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def named_seed(*names: object) -> int:
    """A 63-bit seed from the names of a draw, such as (run seed, step, instance, seat, turn)."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def pick(choices: Sequence[T], weights: Sequence[float], seed: int) -> T:
    """The choice whose share of the weights the uniform draw of a `named_seed` falls into."""
    left = (seed / 2**63) * sum(weights)
    for choice, weight in zip(choices, weights, strict=True):
        left -= weight
        if left < 0:
            return choice
    return choices[-1]
