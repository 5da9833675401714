"""How much of a recorded game is replayed before play starts. Knows no game.

A start is a number of log entries from the beginning of a record, where each message, proposal and
answer is one entry. It never includes the end of the game.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dialop.kit import Entries

RANDOM = "random"


def checked_entries(value: object) -> Entries:
    """Check a start as given in the settings and return it.

    Valid are a number of entries (0: from the beginning), "random", or a share of the words between
    0 and 1. Raises ValueError for anything else.
    """
    count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    share = isinstance(value, float) and math.isfinite(value) and 0 < value < 1
    if count or share or value == RANDOM:
        assert isinstance(value, (int, float, str))
        return value
    raise ValueError(
        f"a start must be a number of entries, 'random', or a share of the words between 0 and 1, "
        f"got {value!r}"
    )


def start_length(
    num_words: Sequence[int], num_words_in_all: int, entries: Entries, *, uniform: float
) -> int:
    """The number of log entries in the start, never so many that the game is over.

    `num_words` counts the words of each entry that a start may include, `num_words_in_all` those of
    the whole game. A number of entries is taken as it is, "random" draws every possible number with
    equal probability, and a share takes the most entries that hold at most that share of all words.
    """
    most = len(num_words)
    if entries == RANDOM:
        return min(most, int(uniform * (most + 1)))
    if isinstance(entries, int):
        return min(most, entries)
    assert isinstance(entries, float)
    room, num = entries * num_words_in_all, 0
    for words in num_words:
        room -= words
        if room < 0:
            break
        num += 1
    return num
