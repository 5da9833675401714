"""A packed row: the tokens of one forward pass, without padding, and who attends to whom.

A row holds S segments back to back. Without shared prefixes a segment is a sequence. With them, a
segment is the part of a sequence that no earlier sequence of the row begins with, and the sequence
is that part after a prefix whose tokens stand in earlier segments. Each token is then computed once
however many sequences contain it.

Shapes: N tokens of the row, S segments, K tokens of all sequences with their prefixes, M positions
whose next token is scored.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The complete sequences of a row whose segments share prefixes.

    `tokens_K` (int64) are the row's indices of each sequence's tokens, sequence after sequence.
    `cu_seqlens_S1` (int32) are the bounds of the sequences in it, `max_seqlen` the longest one.
    """

    tokens_K: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The input of one forward pass.

    `ids_N` and `positions_N` (int64): token ids and their positions in their sequence.
    `cu_seqlens_S1` (int32): the segments' starts and the end, `max_seqlen` the longest segment.
    `predict_M` (int64): the indices in N whose next token is scored. An index that several
    sequences share may occur several times.
    """

    ids_N: Tensor
    positions_N: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    predict_M: Tensor
    prefixes: Prefixes | None = None
