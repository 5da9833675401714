"""Samples become micro-batches: one packed row of tokens without padding, and where the loss looks.

Shapes: N packed tokens of S sequences, M trained tokens. `predict_M` are the places whose NEXT
token is trained, so logits are computed at these places only. Knows no games and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.parallel import World, gather_objects
from selfplay.samples import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass reads.

    `sample_M` indexes `names`, so a bad loss can say whose it is. Values and returns are 0 without
    a critic.
    """

    ids_N: Tensor
    positions_N: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    predict_M: Tensor
    targets_M: Tensor
    advantages_M: Tensor
    old_logprobs_M: Tensor
    importance_M: Tensor
    values_M: Tensor
    returns_M: Tensor
    sample_M: Tensor
    names: tuple[str, ...]


def split_by_tokens(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Places of the sequences in each micro-batch: longest first, a new one when it would overflow.

    A sequence longer than the budget gets a micro-batch of its own. Neighbours are of like length,
    which keeps the padding inside SDPA attention small.
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


def pack(samples: Sequence[Sample], *, device: torch.device) -> MicroBatch:
    """One micro-batch of these samples, back to back."""
    lengths = torch.tensor([0] + [len(s.ids) for s in samples])
    cu_seqlens_S1 = lengths.cumsum(0).to(torch.int32)
    mask_N = torch.tensor([m for s in samples for m in s.mask], dtype=torch.bool)
    starts = cu_seqlens_S1[:-1].long()
    if bool(mask_N[starts].any()):
        raise ValueError("a transcript's first token cannot be trained: nothing predicts it")
    target_places_M = mask_N.nonzero()[:, 0]
    ids_N = torch.tensor([i for s in samples for i in s.ids])
    positions_N = torch.cat([torch.arange(len(s.ids)) for s in samples])
    sample_N = torch.repeat_interleave(torch.arange(len(samples)), lengths[1:])

    def at_targets(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[target_places_M].to(device)

    return MicroBatch(
        ids_N=ids_N.to(device),
        positions_N=positions_N.to(device),
        cu_seqlens_S1=cu_seqlens_S1.to(device),
        max_seqlen=int(lengths.max()),
        predict_M=(target_places_M - 1).to(device),
        targets_M=ids_N[target_places_M].to(device),
        advantages_M=at_targets([a for s in samples for a in s.advantages]),
        old_logprobs_M=at_targets([p for s in samples for p in s.old_logprobs]),
        importance_M=at_targets([w for s in samples for w in s.importance or [1.0] * len(s.ids)]),
        values_M=at_targets([v for s in samples for v in s.values or [0.0] * len(s.ids)]),
        returns_M=at_targets([r for s in samples for r in s.returns or [0.0] * len(s.ids)]),
        sample_M=sample_N[target_places_M].to(device),
        names=tuple(s.name for s in samples),
    )


def micro_batches(
    samples: Sequence[Sample], *, budget: int, device: torch.device
) -> list[MicroBatch]:
    """All samples, packed into micro-batches of at most `budget` tokens."""
    plan = split_by_tokens([len(s.ids) for s in samples], budget=budget)
    return [pack([samples[i] for i in places], device=device) for places in plan]


def share_by_tokens(samples: Sequence[Sample], world: World) -> list[Sample]:
    """This rank's share of all ranks' samples, so that every data-parallel rank trains on about as
    many tokens: the longest first, each to the rank with the fewest so far. Ranks of one tensor
    parallel row get the same. One process keeps its own, in order."""
    if world.world_size == 1:
        return list(samples)
    everyone = [sample for part in gather_objects(list(samples), world) for sample in part]
    loads = [0] * world.dp_size
    mine: list[Sample] = []
    for sample in sorted(everyone, key=lambda s: -len(s.ids)):
        rank = loads.index(min(loads))
        loads[rank] += len(sample.ids)
        if rank == world.dp_rank:
            mine.append(sample)
    return mine


def num_trained_tokens(samples: Sequence[Sample]) -> int:
    return sum(sum(s.mask) for s in samples)


def num_weighed_tokens(samples: Sequence[Sample]) -> int:
    """Trained tokens that were not rejected."""
    return sum(
        sum(m and w > 0 for m, w in zip(s.mask, s.importance or [1.0] * len(s.mask), strict=True))
        for s in samples
    )
