"""A trainer's weights on their way to an engine: full parameters, gathered bucket by bucket.

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
    """Full parameters, one after the other in a flat buffer of its own."""

    flat_N: Tensor
    shapes: dict[str, torch.Size]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its Hugging Face name."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = self.flat_N.split(sizes)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            yield name, part.view(shape)


class Weights:
    """The weights of `model`, those of `names` or all, cast to an engine's `dtype`.

    It is passed over once, inside `all_taken`. Every rank must take each bucket, because a sharded
    model's are gathered as they are taken.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        names: Collection[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`names` are Hugging Face names of parameters without adapters, as `plain_weights` has
        them; `bucket_bytes` is the largest buffer unless a parameter is larger. A GPU holds two.
        """
        self.model, self.dtype = model, dtype
        self._weights = {
            name: weight
            for name, weight in plain_weights(model).items()
            if names is None or name in names
        }
        self.shapes = {name: torch.Size(w.base.shape) for name, w in self._weights.items()}
        self._buckets = self._gathered(bucket_bytes)

    @property
    def num_elements(self) -> int:
        """Over all parameters, unsharded."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets that are left. A bucket may be dropped when the next one is taken."""
        return self._buckets

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its Hugging Face name."""
        for bucket in self:
            yield from bucket.named()

    @contextmanager
    def all_taken(self) -> Iterator[None]:
        """After a block that fails, take the buckets that its engine has left: the other ranks wait
        for them. If it is their gather that fails, none are left."""
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold a bucket; a restart needs room
            for _ in self._buckets:
                pass
            raise

    def _gathered(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Gather a bucket when it is asked for; adapters are merged into their layers' weights."""
        device = next(iter(self._weights.values())).base.device
        for names in plan_buckets(self.shapes, self.dtype, bucket_bytes=bucket_bytes):
            merged = [self._weights[name].merged() for name in names]
            flat_N = gather_flat(merged, dtype=self.dtype, device=device)
            del merged
            bucket = Bucket(flat_N, {name: self.shapes[name] for name in names})
            del flat_N
            yield bucket
            del bucket  # before the next one is filled: only the engine's reader still holds it


def plan_buckets(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[str]]:
    """Split the names, in order, into buckets of at most `bucket_bytes`.

    A larger parameter gets a bucket of its own.
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


@dataclass(frozen=True, slots=True)
class Compared:
    """How many elements of an engine's weights were compared, and how many differ. Each process of
    an engine counts its own copy, with its padding."""

    num_elements: int
    num_different: int
