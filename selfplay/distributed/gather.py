"""Reading sharded parameters back whole, many of them in one collective.

`full_tensor()` of each parameter alone is a collective a parameter, most of them too small to fill
a link. Here every rank packs its own pieces of a whole bucket into one row, one all-gather brings
all rows to all ranks, and each piece is copied to its place. Exact: bytes are moved, never added.

Shapes: N elements of a flat buffer, R ranks, L elements of a rank's row of pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

Box = tuple[slice, ...]


@torch.no_grad()
def gather_flat(
    parameters: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """These parameters whole, one after the other in a fresh flat buffer [N] of `dtype`.

    Sharded ones are cast first, so that fewer bytes travel; every rank of the default process group
    must call with the same parameters, which are sharded over all its ranks or over a dimension of
    their mesh. What lies whole on this rank is only copied. On CUDA the buffer's values are queued
    on the current stream, not yet final.
    """
    flat_N = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=device)
    parts = flat_N.split([p.numel() for p in parameters])
    wholes = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
    sharded: list[tuple[DTensor, Tensor]] = []
    here: list[tuple[Tensor, Tensor]] = []
    for parameter, whole in zip(parameters, wholes, strict=True):
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            sharded.append((parameter, whole))
        else:
            here.append((whole, local_part(parameter)))
    _copy(here)
    if sharded:
        _gather(sharded, dtype=dtype, device=device)
    return flat_N


def _gather(
    sharded: Sequence[tuple[DTensor, Tensor]], *, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill each whole tensor from the pieces of all ranks, by one all-gather."""
    num_ranks = dist.get_world_size()
    # A piece has room for the largest of its kind, which is the first rank's, so that all rows are
    # cut alike and no rank has to know what another holds.
    boxes = [_boxes(parameter) for parameter, _ in sharded]
    rooms = [math.prod(_sizes(held[0][1])) for held in boxes]
    starts = [0, *accumulate(rooms)][:-1]
    row_L = torch.empty(sum(rooms), dtype=dtype, device=device)
    mine = [local_part(parameter) for parameter, _ in sharded]
    _copy(
        [
            (row_L[start : start + piece.numel()].view(piece.shape), piece)
            for start, piece in zip(starts, mine, strict=True)
        ]
    )
    rows_RL = torch.empty(num_ranks, len(row_L), dtype=dtype, device=device)
    # As bytes: gloo knows fewer dtypes than torch.
    dist.all_gather(list(rows_RL.view(torch.uint8).unbind(0)), row_L.view(torch.uint8))
    pieces: list[tuple[Tensor, Tensor]] = []
    for start, held, (_, whole) in zip(starts, boxes, sharded, strict=True):
        for rank, box in held:
            sizes = _sizes(box)
            piece_L = rows_RL[rank, start : start + math.prod(sizes)]
            pieces.append((whole[box], piece_L.view(sizes)))
    _copy(pieces)


def box_at(parameter: DTensor, coordinate: Sequence[int]) -> Box:
    """The rectangle of the whole tensor that the rank at this place of the parameter's mesh holds.

    The mesh's last dimension (tensor parallel) divided first, the one before it (FSDP) divided what
    was left: the order in which `shard` applies them. Each division is torch.chunk's, so the last
    ranks get fewer rows, or none, where they do not divide.
    """
    mesh_shape = parameter.device_mesh.shape
    return _box(parameter.shape, parameter.placements, mesh_shape, coordinate)


def _box(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    box = [slice(0, size) for size in shape]
    placed = list(zip(placements, mesh_shape, coordinate, strict=True))
    for placement, parts, index in reversed(placed):
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            box[dim] = chunk(box[dim], parts, index)
    return tuple(box)


def chunk(rows: slice, parts: int, index: int) -> slice:
    """The index-th of torch.chunk's parts of a range."""
    step = -(-(rows.stop - rows.start) // parts)
    start = min(rows.stop, rows.start + index * step)
    return slice(start, min(rows.stop, start + step))


def _boxes(parameter: DTensor) -> tuple[tuple[int, Box], ...]:
    """Each rank of the parameter's mesh with the rectangle it holds."""
    return _boxes_of(tuple(parameter.shape), parameter.placements, parameter.device_mesh)


# A model has few shapes, a push many parameters, and asking a mesh for its ranks is slow.
@lru_cache(maxsize=1024)
def _boxes_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh
) -> tuple[tuple[int, Box], ...]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    coordinates = product(*map(range, mesh.shape))
    return tuple(
        (rank, _box(shape, placements, mesh.shape, coordinate))
        for rank, coordinate in zip(ranks, coordinates, strict=True)
    )


def _sizes(box: Box) -> list[int]:
    return [part.stop - part.start for part in box]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """Where in its own mesh this rank's part of a tensor lies: ranks at the same place hold the
    same values. () for a tensor that is not sharded."""
    coordinate = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else None
    return tuple(coordinate or ())


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each source into its target, cast on the way, by as few kernels as can be."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
