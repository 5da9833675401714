"""Which tokens of a micro-batch are computed once: the prefixes that its sequences share.

Sequences in lexicographic order are read as a tree: each one adds a segment to the path of the one
before it, after the prefix that both share. A segment's tokens stand at the same positions and see
the same tokens in every sequence that contains them, so their hidden states are the same and are
computed once. This covers the prompt of a group's games, the played turns before a branch point,
and rules that all games share. Knows token ids only.

Shapes: N tokens computed, K tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int]
# Sharing must save at least this fraction of the tokens, or gathering keys costs more.
LEAST_SAVED = 0.1


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of sequences in a row.

    `new[i]` is the length of sequence i's own segment. `tokens_K` are the row indices of every
    sequence's tokens, sequence after sequence.
    """

    new: list[int]
    tokens_K: NDArray[np.int64]


def split_by_tokens(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices of the samples in each micro-batch, filled longest first up to `budget` tokens.

    A sample longer than the budget gets its own micro-batch. Samples of similar length end up
    together, which keeps the padding inside SDPA attention small.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    room = 0
    for i in order:
        if not batches or lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def split_by_prefix(samples: Sequence[Sequence[Ids]], *, budget: int) -> list[list[int]]:
    """Indices of the samples in each micro-batch of at most `budget` computed tokens. Each sample
    is given by its sequences, in the order in which they are packed.

    Samples that share a prefix are neighbours. If sharing saves too few tokens (LEAST_SAVED), the
    batches are those of `split_by_tokens`.
    """
    lengths = [sum(map(len, sequences)) for sequences in samples]
    order = sorted(range(len(samples)), key=lambda i: (samples[i], i))
    shared = shared_lengths([sequence for i in order for sequence in samples[i]])
    if sum(shared) < LEAST_SAVED * sum(lengths):
        return split_by_tokens(lengths, budget=budget)
    batches: list[list[int]] = []
    room, left = 0, iter(shared)
    for i in order:
        saved = list(islice(left, len(samples[i])))
        num = lengths[i] - sum(saved)
        if not batches or num > room:
            batches.append([])
            room, num = budget, lengths[i] - sum(saved[1:])  # nothing is before its first sequence
        batches[-1].append(i)
        room -= num
    return batches


def layout(sequences: Sequence[Ids]) -> Layout | None:
    """The layout of sequences in one row, in their order; None if sharing saves too few tokens."""
    shared = shared_lengths(sequences)
    if sum(shared) < LEAST_SAVED * sum(map(len, sequences)):
        return None
    path = np.empty(0, np.int64)
    paths, new, num = [], [], 0
    for sequence, prefix in zip(sequences, shared, strict=True):
        new.append(len(sequence) - prefix)
        path = np.concatenate([path[:prefix], np.arange(num, num + new[-1])])
        paths.append(path)
        num += new[-1]
    return Layout(new, np.concatenate(paths))


def shared_lengths(sequences: Sequence[Ids]) -> list[int]:
    """How many tokens each sequence shares with the one before it; 0 for the first.

    At least one token of each sequence is its own, so no segment is empty.
    """
    arrays = [np.fromiter(sequence, np.int64, len(sequence)) for sequence in sequences]
    shared = [0] * min(1, len(arrays))
    for before, after in pairwise(arrays):
        num = min(len(before), len(after) - 1)
        differs = before[:num] != after[:num]
        shared.append(int(differs.argmax()) if differs.any() else num)
    return shared
