"""Generated instances: "Add 3 to my number.", where only the user knows the number.

Each is a pure function of (seed, index). A guess is right about once in `max_value` times; an
assistant that asks for the number is always right. This is the smallest task in which asking pays.
"""

from __future__ import annotations

import random
import re

from dialop.collab.task import CollabInstance

HIDDEN = "My number is {}."
REQUESTS = ("Add {} to my number.", "Take {} from my number.")
# Longer numbers are not read: a model can write any length, and Python rejects very long numbers.
_CHANGE = re.compile(r"Add (\d{1,18}) to my number\.|Take (\d{1,18}) from my number\.")
_HIDDEN = re.compile(r"My number is (-?\d{1,18})\.")


def hidden_number(*, seed: int, index: int, max_value: int) -> CollabInstance:
    """Instance `index` of a stream. The hidden number is 0 or more, the known one 1 or more, and
    both are below `max_value`."""
    draw = random.Random(f"hidden number {seed} {index}")
    request = draw.choice(REQUESTS).format(draw.randrange(1, max_value))
    fact = HIDDEN.format(draw.randrange(max_value))
    target = solve(request, fact)
    assert target is not None
    return CollabInstance(
        key=f"number-{seed}-{index}",
        task="math",
        request=request,
        goal=f"{request} {fact}",
        target=str(target),
    )


def change(request: str) -> int | None:
    """The number that the request adds to the hidden number; None for another kind of request."""
    match = _CHANGE.search(request)
    return None if match is None else int(match[1] or f"-{match[2]}")


def solve(request: str, replies: str) -> int | None:
    """The answer; None for another kind of request, or if `replies` do not state the number."""
    by, number = change(request), _HIDDEN.search(replies)
    return None if by is None or number is None else int(number[1]) + by


def phrases() -> list[str]:
    """The fixed phrases of the requests and the fact; a tokenizer can make each one token."""
    parts = [part for text in (HIDDEN, *REQUESTS) for part in text.split("{}")]
    return [part for part in parts if len(part) > 1]
