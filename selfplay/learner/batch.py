"""Packs samples into micro-batches: one row of tokens without padding, and the trained positions.

Shapes: N packed tokens of S samples, K tokens of all samples, M trained tokens. Logits are computed
only at the positions whose next token is trained. Knows no games and no text.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfplay.credit.sample import Sample
from selfplay.distributed import World, exchange_objects, gather_objects
from selfplay.learner.prefixes import layout, split_by_prefix, split_by_tokens
from selfplay.model.row import PackedRow, Prefixes

# Fills the passes of a rank that has fewer micro-batches than others. Its losses have weight 0.
FILLER = Sample(name="", ids=[0, 0], mask=[0, 1], old_logprobs=[0.0, 0.0], advantages=[0.0, 0.0])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward pass.

    `sample_M` indexes `names`, so an error can name the sample of a bad loss. Values and returns
    are 0 without a critic.
    """

    row: PackedRow
    targets_M: Tensor
    advantages_M: Tensor
    old_logprobs_M: Tensor
    importance_M: Tensor
    values_M: Tensor
    returns_M: Tensor
    sample_M: Tensor
    names: tuple[str, ...]


def pack(samples: Sequence[Sample], *, device: torch.device, share: bool = True) -> MicroBatch:
    """One micro-batch of these samples, back to back. Each sequence of a sample is packed like a
    separate sample; sequences without a trained token are left out.

    With `share`, a prefix that a sample shares with the one before it is computed once. Raises
    ValueError for a sample whose first token is trained.
    """
    parts = [(i, start, end) for i, s in enumerate(samples) for start, end in s.sequences()]
    sequences = [samples[i].ids[start:end] for i, start, end in parts]
    lengths_S = np.array([len(ids) for ids in sequences])
    bounds_S1 = _bounds(lengths_S)
    mask_K = np.frombuffer(b"".join(bytes(samples[i].mask[a:b]) for i, a, b in parts), np.bool_)
    if mask_K[bounds_S1[:-1]].any():
        raise ValueError("a transcript's first token cannot be trained: nothing predicts it")
    targets_at_M = mask_K.nonzero()[0]
    # Several times faster than `torch.tensor` on a list.
    ids_K = np.fromiter(chain.from_iterable(sequences), np.int64, len(mask_K))
    positions_K = np.arange(len(ids_K)) - np.repeat(bounds_S1[:-1], lengths_S)

    def on_device(values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        # From pinned memory a copy to a GPU does not wait for the passes before it.
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    def at_targets(rows: Sequence[Sequence[float]], *, absent: float = 0.0) -> Tensor:
        if not any(rows):
            return torch.full((len(targets_at_M),), absent, dtype=torch.float32, device=device)
        kept = [
            compress(row or repeat(absent), s.mask) for row, s in zip(rows, samples, strict=True)
        ]
        return on_device(np.fromiter(chain.from_iterable(kept), np.float32, len(targets_at_M)))

    sharing = layout(sequences) if share else None
    if sharing is None:
        row = PackedRow(
            on_device(ids_K),
            on_device(positions_K),
            on_device(bounds_S1.astype(np.int32)),
            int(lengths_S.max()),
            on_device(targets_at_M - 1),
        )
    else:
        tokens_K, new_S = sharing.tokens_K, np.array(sharing.new)
        first_N = np.unique(tokens_K, return_index=True)[1]
        row = PackedRow(
            on_device(ids_K[first_N]),
            on_device(positions_K[first_N]),
            on_device(_bounds(new_S).astype(np.int32)),
            int(new_S.max()),
            on_device(tokens_K[targets_at_M - 1]),
            Prefixes(
                on_device(tokens_K), on_device(bounds_S1.astype(np.int32)), int(lengths_S.max())
            ),
        )
    return MicroBatch(
        row=row,
        targets_M=on_device(ids_K[targets_at_M]),
        advantages_M=at_targets([s.advantages for s in samples]),
        old_logprobs_M=at_targets([s.old_logprobs for s in samples]),
        importance_M=at_targets([s.importance for s in samples], absent=1.0),
        values_M=at_targets([s.values for s in samples]),
        returns_M=at_targets([s.returns for s in samples]),
        sample_M=on_device(np.repeat(np.array([i for i, _, _ in parts]), lengths_S)[targets_at_M]),
        names=tuple(s.name for s in samples),
    )


def _bounds(lengths_S: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], lengths_S.cumsum()])


def split(samples: Sequence[Sample], *, budget: int, share: bool = True) -> list[list[int]]:
    """The indices of the samples in each micro-batch of at most `budget` computed tokens."""
    sequences = [[s.ids[start:end] for start, end in s.sequences()] for s in samples]
    if share:
        return split_by_prefix(sequences, budget=budget)
    return split_by_tokens([sum(map(len, of)) for of in sequences], budget=budget)


def micro_batches(
    samples: Sequence[Sample],
    plan: Sequence[Sequence[int]],
    *,
    device: torch.device,
    share: bool = True,
) -> Iterator[MicroBatch]:
    """The micro-batches of a plan of `split`; a filler where it has no samples.

    Each is packed when it is asked for, while a GPU still works on the ones before it.
    """
    for indices in plan:
        yield pack([samples[i] for i in indices] or [FILLER], device=device, share=share)


def is_filler(batch: MicroBatch) -> bool:
    return batch.names == (FILLER.name,)


def balance_tokens(samples: Sequence[Sample], world: World) -> list[Sample]:
    """This rank's share of all ranks' samples, balanced by tokens over the data-parallel ranks.

    Most samples stay on the rank that played them. The ranks of one tensor-parallel row get the
    same samples. A single process keeps its own, in order.
    """
    if world.world_size == 1:
        return list(samples)
    rows = deal(gather_objects([len(sample.ids) for sample in samples], world), tp=world.tp)
    parts = [
        [samples[i] for rank, i in rows[receiver // world.tp] if rank == world.rank]
        for receiver in range(world.world_size)
    ]
    sources = [iter(part) for part in exchange_objects(parts, world)]
    return [next(sources[rank]) for rank, _ in rows[world.dp_rank]]


def deal(sizes: Sequence[Sequence[int]], *, tp: int) -> list[list[tuple[int, int]]]:
    """The samples that each row of `tp` neighbouring ranks trains on, as sorted (rank, index).

    `sizes` are the numbers of tokens of each rank's samples. Every sample starts in its own rank's
    row. Then, as long as there is one, the largest sample of at most half the difference moves from
    the row with the most tokens to the row with the fewest.
    """
    rows = [
        sorted((size, rank, i) for rank in range(a, a + tp) for i, size in enumerate(sizes[rank]))
        for a in range(0, len(sizes), tp)
    ]
    loads = [sum(size for size, _, _ in row) for row in rows]
    while True:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        half = (loads[full] - loads[empty]) // 2
        num_fitting = bisect_right(rows[full], half, key=lambda sample: sample[0])
        if not num_fitting:
            return [sorted((rank, i) for _, rank, i in row) for row in rows]
        sample = rows[full].pop(num_fitting - 1)
        insort(rows[empty], sample)
        loads[full] -= sample[0]
        loads[empty] += sample[0]


def num_trained_tokens(samples: Sequence[Sample]) -> int:
    return sum(sum(s.mask) for s in samples)


def num_weighed_tokens(samples: Sequence[Sample]) -> int:
    """Trained tokens that were not rejected."""
    return sum(
        sum(w > 0 for w in compress(s.importance, s.mask)) if s.importance else sum(s.mask)
        for s in samples
    )
