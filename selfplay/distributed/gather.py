"""Gathers the full values of many sharded parameters with one collective.

`full_tensor()` needs one collective per parameter, and most parameters are too small to use a
link's bandwidth. Here every rank packs its pieces of all parameters into one row, one all-gather
sends all rows to all ranks, and each piece is copied into its tensor. Exact: bytes are moved, never
added.

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
    """The full parameters, one after the other in a new flat buffer [N] of `dtype`.

    Sharded parameters are cast before they are sent. Parameters that this rank holds in full are
    only copied. Every rank of the default process group must call this with the same parameters,
    sharded over all ranks or over one mesh dimension. On CUDA the values are final only after the
    current stream is synchronized.
    """
    flat_N = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=device)
    parts = flat_N.split([p.numel() for p in parameters])
    targets = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
    sharded: list[tuple[DTensor, Tensor]] = []
    local: list[tuple[Tensor, Tensor]] = []
    for parameter, target in zip(parameters, targets, strict=True):
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            sharded.append((parameter, target))
        else:
            local.append((target, local_part(parameter)))
    _copy(local)
    if sharded:
        _gather(sharded, dtype=dtype, device=device)
    return flat_N


def _gather(
    sharded: Sequence[tuple[DTensor, Tensor]], *, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill each full tensor from the pieces of all ranks, with one all-gather."""
    num_ranks = dist.get_world_size()
    # Each piece gets as much space as the first rank's piece, which is the largest, so that all
    # ranks' rows have the same layout.
    boxes = [
        _boxes_of(tuple(parameter.shape), parameter.placements, parameter.device_mesh)
        for parameter, _ in sharded
    ]
    capacities = [math.prod(_sizes(rank_boxes[0][1])) for rank_boxes in boxes]
    starts = [0, *accumulate(capacities)][:-1]
    row_L = torch.empty(sum(capacities), dtype=dtype, device=device)
    local_pieces = [local_part(parameter) for parameter, _ in sharded]
    _copy(
        [
            (row_L[start : start + piece.numel()].view(piece.shape), piece)
            for start, piece in zip(starts, local_pieces, strict=True)
        ]
    )
    rows_RL = torch.empty(num_ranks, len(row_L), dtype=dtype, device=device)
    # As bytes, because gloo does not support all of torch's dtypes.
    dist.all_gather(list(rows_RL.view(torch.uint8).unbind(0)), row_L.view(torch.uint8))
    pieces: list[tuple[Tensor, Tensor]] = []
    for start, rank_boxes, (_, target) in zip(starts, boxes, sharded, strict=True):
        for rank, box in rank_boxes:
            sizes = _sizes(box)
            piece_L = rows_RL[rank, start : start + math.prod(sizes)]
            pieces.append((target[box], piece_L.view(sizes)))
    _copy(pieces)


def box_at(parameter: DTensor, coordinate: Sequence[int]) -> Box:
    """The box of the full tensor that the rank at `coordinate` of the parameter's mesh holds.

    As in `shard`, the mesh's last dimension (tensor parallel) splits the tensor first, the previous
    one (FSDP) splits each part. Each split is torch.chunk's: if the rows do not divide evenly, the
    last ranks get fewer rows, or none.
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
    """Part `index` of the range `rows` when torch.chunk splits it into `parts`."""
    step = -(-(rows.stop - rows.start) // parts)
    start = min(rows.stop, rows.start + index * step)
    return slice(start, min(rows.stop, start + step))


# Cached, because many parameters share a shape and reading a mesh's ranks is slow.
@lru_cache(maxsize=1024)
def _boxes_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh
) -> tuple[tuple[int, Box], ...]:
    """Each rank of the mesh with the box that it holds of a parameter."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    coordinates = product(*map(range, mesh.shape))
    return tuple(
        (rank, _box(shape, placements, mesh.shape, coordinate))
        for rank, coordinate in zip(ranks, coordinates, strict=True)
    )


def _sizes(box: Box) -> list[int]:
    return [part.stop - part.start for part in box]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the full tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_as(local: Tensor, like: Tensor) -> Tensor:
    """A tensor with the shape and sharding of `like` and `local` as this rank's part; `local`
    itself if `like` is not sharded. Nothing is sent."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def shard_index(tensor: Tensor) -> tuple[int, ...]:
    """This rank's coordinate in the mesh dimensions that split the tensor; () for a tensor that is
    not sharded.

    Ranks at the same coordinate hold the same values.
    """
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, tensor.placements, strict=False)
    return tuple(index for index, placement in placed if not placement.is_replicate())


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy and cast each (target, source) pair with as few kernels as possible."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
