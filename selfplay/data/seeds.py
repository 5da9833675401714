"""Named seeds: every random draw of a run depends only on the seed's names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def named_seed(*names: object) -> int:
    """A 63-bit seed from the names of a draw, such as (run seed, step, instance, seat, turn).

    Different names give independent seeds; the order of calls does not matter. Never rename a draw:
    a new name would change the results of every run.
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def pick(choices: Sequence[T], weights: Sequence[float], seed: int) -> T:
    """A choice sampled in proportion to `weights`; `seed` comes from `named_seed`."""
    remaining = (seed / 2**63) * sum(weights)
    for choice, weight in zip(choices, weights, strict=True):
        remaining -= weight
        if remaining < 0:
            return choice
    return choices[-1]
