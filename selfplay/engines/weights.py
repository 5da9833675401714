"""The trainer's weights on their way to an engine: full parameters, gathered bucket by bucket.

Shapes: N elements of a flat buffer. Sizes in bytes.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfplay.distributed import gather_flat
from selfplay.model.lora import plain_weights

# Each bucket has a fixed cost, so smaller ones are slower (docs/notes/log.md: 0.25 to 4 GiB).
BUCKET_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Bucket:
    """Full parameters, one after the other in one flat buffer."""

    flat_N: Tensor
    shapes: dict[str, torch.Size]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its Hugging Face name."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = self.flat_N.split(sizes)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            yield name, part.view(shape)


class Weights:
    """The weights of `model`, all or only `names`, cast to an engine's `dtype`.

    Iterate over it once, inside `all_taken`. Every rank must take each bucket, because taking one
    gathers the parameters of a sharded model.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        names: Collection[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        policy: str = "",
    ) -> None:
        """The adapters of `policy` are merged. `names` are Hugging Face names of parameters without
        adapters, as in `plain_weights`; `bucket_bytes` limits a buffer unless a parameter is
        larger. A GPU holds two buffers.
        """
        self.model, self.dtype = model, dtype
        self._weights = {
            name: weight
            for name, weight in plain_weights(model, policy).items()
            if names is None or name in names
        }
        self.shapes = {name: torch.Size(w.base.shape) for name, w in self._weights.items()}
        self._buckets = self._gathered(bucket_bytes)

    @property
    def num_elements(self) -> int:
        """The number of elements of all parameters, unsharded."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def __iter__(self) -> Iterator[Bucket]:
        """The remaining buckets. A bucket may be dropped when the next one is taken."""
        return self._buckets

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its Hugging Face name."""
        for bucket in self:
            yield from bucket.named()

    @contextmanager
    def all_taken(self) -> Iterator[None]:
        """If the block fails, take the remaining buckets, because the other ranks wait for them. If
        a gather itself fails, none remain."""
        try:
            yield
        except Exception as error:
            # The frames hold a bucket, and a restart needs its memory.
            traceback.clear_frames(error.__traceback__)
            for _ in self._buckets:
                pass
            raise

    def _gathered(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Gather each bucket when it is requested; adapters are merged into their weights."""
        device = next(iter(self._weights.values())).base.device
        for names in plan_buckets(self.shapes, self.dtype, bucket_bytes=bucket_bytes):
            merged = [self._weights[name].merged() for name in names]
            flat_N = gather_flat(merged, dtype=self.dtype, device=device)
            del merged
            bucket = Bucket(flat_N, {name: self.shapes[name] for name in names})
            del flat_N
            yield bucket
            del bucket  # so that only the engine's reader holds it while the next one is filled


def plan_buckets(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[str]]:
    """Split the names, in order, into buckets of at most `bucket_bytes`.

    A larger parameter gets its own bucket.
    """
    buckets: list[list[str]] = []
    free_bytes = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > free_bytes or not buckets:
            buckets.append([])
            free_bytes = bucket_bytes
        buckets[-1].append(name)
        free_bytes -= num_bytes
    return buckets


def why_merged(model: nn.Module, library: str) -> str | None:
    """Why a library whose loader knows each expert alone cannot take this model's weights; None if
    it can.

    transformers holds a layer's experts as one tensor, which such a loader does not split. The
    model may be on the meta device.
    """
    if any("experts" in name and p.ndim == 3 for name, p in model.named_parameters()):
        return f"weight sync with {library} does not support merged experts: set engine.kind to hf"
    return None


@dataclass(frozen=True, slots=True)
class Compared:
    """How many elements of an engine's weights were compared, and how many differ. Each process of
    an engine counts its own copy, including padding."""

    num_elements: int
    num_different: int
