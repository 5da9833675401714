"""Packs samples into micro-batches: one row of tokens without padding, and the trained positions.

A prefix that several sequences share is computed once. Sequences in lexicographic order form a
tree: each one adds a segment to the path of the previous one, after the prefix that both share. A
segment's tokens have the same positions and see the same tokens in every sequence that contains
them, so their hidden states are the same. This covers the prompt of a group's games, the played
turns before a branch point, and rules that all games share.

Shapes: N tokens of the row of S sequences, K tokens of all sequences, M trained tokens. Logits are
computed only at the positions whose next token is trained.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfplay.advantages.sample import Sample
from selfplay.distributed import World, all_reduce_max, exchange_objects, gather_objects
from selfplay.model.attention import PackedRow, Prefixes

# A rank with fewer micro-batches than others runs its last passes on this sample, without a loss,
# because every rank must join the collectives of each pass.
DUMMY = Sample(name="", ids=[0, 0], mask=[0, 1], old_logprobs=[0.0, 0.0], advantages=[0.0, 0.0])
# Sharing must save at least this fraction of the tokens, or gathering keys costs more.
MIN_SAVED = 0.1

Ids = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward pass.

    `sample_M` indexes `names`, so an error can name the sample of a bad loss. `columns` are the
    samples' columns [M] by name, 0 where a sample has none; a dummy has every column.
    """

    row: PackedRow
    targets_M: Tensor
    advantages_M: Tensor
    old_logprobs_M: Tensor
    sample_M: Tensor
    names: tuple[str, ...]
    columns: dict[str, Tensor]

    @property
    def is_dummy(self) -> bool:
        """Whether it only stands in for a batch that other ranks have; its values do not count."""
        return self.names == (DUMMY.name,)


def micro_batches(
    samples: Sequence[Sample], world: World, *, budget: int, share_prefixes: bool = True
) -> Iterator[tuple[list[int], MicroBatch]]:
    """This rank's micro-batches of at most `budget` computed tokens, with their samples' indices.

    Every rank must call and gets the same number, filled up with dummies, which have no indices.
    Each is packed when it is requested, while a GPU still works on the previous ones.
    """
    sequences = [[_ids(s.ids[start:end]) for start, end in s.sequences()] for s in samples]
    batches = split(sequences, budget=budget, share_prefixes=share_prefixes)
    most = int(all_reduce_max(float(len(batches)), world))
    batches += [[] for _ in range(most - len(batches))]
    for indices in batches:
        packed = [samples[i] for i in indices] or [DUMMY]
        yield indices, pack(packed, device=world.device, share_prefixes=share_prefixes)


def split(
    samples: Sequence[Sequence[Ids]], *, budget: int, share_prefixes: bool = True
) -> list[list[int]]:
    """Indices of the samples in each micro-batch of at most `budget` computed tokens. Each sample
    is given by its sequences, in packing order.

    Samples that share a prefix are neighbours. If sharing saves too few tokens (MIN_SAVED), the
    longest come first: samples of similar length keep the padding inside SDPA attention small. A
    sample longer than the budget gets its own micro-batch.
    """
    lengths = [sum(map(len, sequences)) for sequences in samples]
    order = sorted(range(len(samples)), key=lambda i: (-lengths[i], i))
    shared = [0] * sum(map(len, samples))
    if share_prefixes:
        # Bytes of numbers, the highest byte first, have the order of the numbers.
        keys = [[_ids(ids).astype(">i8").tobytes() for ids in sequences] for sequences in samples]
        by_prefix = sorted(range(len(samples)), key=lambda i: (keys[i], i))
        lengths_shared = shared_lengths([sequence for i in by_prefix for sequence in samples[i]])
        if pays_off(sum(lengths_shared), sum(lengths)):
            order, shared = by_prefix, lengths_shared
    batches: list[list[int]] = []
    num = num_saved = 0
    in_order = iter(shared)
    for i in order:
        saved = list(islice(in_order, len(samples[i])))
        num, num_saved = num + lengths[i], num_saved + sum(saved)
        if not batches or num - num_saved * pays_off(num_saved, num) > budget:
            batches.append([])
            # The first sequence of a batch has no previous one.
            num, num_saved = lengths[i], sum(saved[1:])
        batches[-1].append(i)
    return batches


def pack(
    samples: Sequence[Sample], *, device: torch.device, share_prefixes: bool = True
) -> MicroBatch:
    """One micro-batch of these samples, back to back. Each sequence of a sample is packed like a
    separate sample; sequences without a trained token are left out.

    With `share_prefixes`, a prefix that a sample shares with the previous one is computed once.
    Raises ValueError for a sample whose first token is trained.
    """
    ranges = [(i, start, end) for i, s in enumerate(samples) for start, end in s.sequences()]
    sequences = [_ids(samples[i].ids[a:b]) for i, a, b in ranges]
    lengths_S = np.array([len(ids) for ids in sequences])
    bounds_S1 = _bounds(lengths_S)
    masks = [np.frombuffer(bytes(s.mask), np.bool_) for s in samples]
    mask_K = np.concatenate([masks[i][a:b] for i, a, b in ranges])
    if mask_K[bounds_S1[:-1]].any():
        raise ValueError("a transcript's first token cannot be trained: nothing predicts it")
    trained_M = mask_K.nonzero()[0]
    ids_K = np.concatenate(sequences)
    sample_K = np.repeat(np.array([i for i, _, _ in ranges]), lengths_S)
    positions_K = np.arange(len(ids_K)) - np.repeat(bounds_S1[:-1], lengths_S)

    def at_targets(rows: Sequence[Sequence[float]]) -> NDArray[np.float32]:
        values = [
            np.asarray(row, np.float32)[flags] if row else np.zeros(flags.sum(), np.float32)
            for row, flags in zip(rows, masks, strict=True)
        ]
        return np.concatenate(values)

    names = sorted({name for s in samples for name in s.columns})
    arrays = [
        ids_K[trained_M],
        sample_K[trained_M],
        at_targets([s.advantages for s in samples]),
        at_targets([s.old_logprobs for s in samples]),
        *(at_targets([s.columns.get(name, ()) for s in samples]) for name in names),
    ]
    ids_N, positions_N, new_S, predict_M = ids_K, positions_K, lengths_S, trained_M - 1
    shared = layout(sequences) if share_prefixes else None
    if shared is not None:
        first_N = np.unique(shared.tokens_K, return_index=True)[1]
        ids_N, positions_N, new_S = ids_K[first_N], positions_K[first_N], np.array(shared.new)
        predict_M = shared.tokens_K[predict_M]
        arrays += [shared.tokens_K, bounds_S1.astype(np.int32)]
    arrays += [ids_N, positions_N, _bounds(new_S).astype(np.int32), predict_M]
    targets_M, sample_M, advantages_M, old_logprobs_M, *others, ids, positions, starts, predict = (
        _on_device(arrays, device)
    )
    prefixes = None
    if shared is not None:
        prefixes = Prefixes(others[-2], others[-1], int(lengths_S.max()))
    columns = dict(zip(names, others, strict=False))
    if samples == [DUMMY]:
        columns = defaultdict(lambda: torch.zeros(1, device=device))
    return MicroBatch(
        row=PackedRow(ids, positions, starts, int(new_S.max()), predict, prefixes),
        targets_M=targets_M,
        advantages_M=advantages_M,
        old_logprobs_M=old_logprobs_M,
        sample_M=sample_M,
        names=tuple(s.name for s in samples),
        columns=columns,
    )


def _ids(sequence: Ids) -> NDArray[np.int64]:
    """The ids as an array, without a copy if they are one."""
    return np.asarray(sequence, np.int64)


def _on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors, all in one copy: each costs the host as long as a small kernel. From
    pinned memory the copy to a GPU does not wait for passes. `.data` lets autograd tell a change of
    one from a change of another."""
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, part in zip(arrays, pinned.split(sizes), strict=True):
        part[: array.nbytes].numpy().view(array.dtype)[:] = array
    moved = pinned.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).data
        for array, part in zip(arrays, moved, strict=True)
    ]


def _bounds(lengths_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """The start of each segment, and the end of the last one [S + 1]."""
    return np.concatenate([[0], lengths_S.cumsum()])


def num_trained_tokens(samples: Sequence[Sample]) -> int:
    """The number of tokens with mask 1."""
    return sum(bytes(s.mask).count(1) for s in samples)


# --- shared prefixes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of sequences in a row.

    `new[i]` is the length of sequence i's own segment. `tokens_K` are the row indices of each
    sequence's tokens, sequence after sequence.
    """

    new: list[int]
    tokens_K: NDArray[np.int64]


def layout(sequences: Sequence[Ids]) -> Layout | None:
    """The layout of sequences in one row, in their order; None if sharing saves too few tokens."""
    shared = shared_lengths(sequences)
    if not pays_off(sum(shared), sum(map(len, sequences))):
        return None
    path = np.empty(0, np.int64)
    paths, new, num = [], [], 0
    for sequence, prefix in zip(sequences, shared, strict=True):
        new.append(len(sequence) - prefix)
        path = np.concatenate([path[:prefix], np.arange(num, num + new[-1])])
        paths.append(path)
        num += new[-1]
    return Layout(new, np.concatenate(paths))


def pays_off(num_shared: int, num_tokens: int) -> bool:
    """Whether sharing saves enough of a row's tokens to be worth it."""
    return num_shared >= MIN_SAVED * num_tokens


def shared_lengths(sequences: Sequence[Ids]) -> list[int]:
    """How many tokens each sequence shares with the previous one; 0 for the first.

    At least one token of each sequence is never shared, so no segment is empty.
    """
    arrays = [*map(_ids, sequences)]
    shared = [0] * min(1, len(arrays))
    for before, after in pairwise(arrays):
        num = min(len(before), len(after) - 1)
        differs = before[:num] != after[:num]
        shared.append(int(differs.argmax()) if differs.any() else num)
    return shared


# --- samples over ranks ---------------------------------------------------------------------------


def balance_tokens(samples: Sequence[Sample], world: World) -> list[Sample]:
    """The samples that this rank trains on; all data-parallel ranks get about the same number of
    tokens.

    Most samples stay on the rank that played them. The ranks of one tensor-parallel group get the
    same samples. A single process keeps its samples, in order.
    """
    if world.world_size == 1:
        return list(samples)
    groups = deal(gather_objects([sample.num_read for sample in samples], world), tp=world.tp)
    outgoing = [
        [samples[i] for rank, i in groups[receiver // world.tp] if rank == world.rank]
        for receiver in range(world.world_size)
    ]
    sources = [iter(received) for received in exchange_objects(outgoing, world)]
    return [next(sources[rank]) for rank, _ in groups[world.dp_rank]]


def deal(sizes: Sequence[Sequence[int]], *, tp: int) -> list[list[tuple[int, int]]]:
    """The samples that each group of `tp` neighbouring ranks trains on, as sorted (rank, index).

    `sizes` has the token counts of each rank's samples. Every sample starts in its rank's group.
    Then the largest sample of at most half the difference moves from the group with the most tokens
    to the one with the fewest, until there is none.
    """
    groups = [
        sorted((size, rank, i) for rank in range(a, a + tp) for i, size in enumerate(sizes[rank]))
        for a in range(0, len(sizes), tp)
    ]
    loads = [sum(size for size, _, _ in group) for group in groups]
    while True:
        most, fewest = loads.index(max(loads)), loads.index(min(loads))
        half = (loads[most] - loads[fewest]) // 2
        num_fitting = bisect_right(groups[most], half, key=lambda sample: sample[0])
        if not num_fitting:
            return [sorted((rank, i) for _, rank, i in group) for group in groups]
        sample = groups[most].pop(num_fitting - 1)
        insort(groups[fewest], sample)
        loads[most] -= sample[0]
        loads[fewest] += sample[0]
