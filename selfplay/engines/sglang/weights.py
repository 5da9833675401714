"""How weights travel to an SGLang engine: buckets, payloads, and the layout they take on there.

A bucket is one flat tensor of whole parameters under Hugging Face names; a payload is what one
tensor-parallel rank of the engine opens it from (a CUDA IPC handle, or a shared memory file on
CPU). Sizes in bytes. Knows no training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from selfplay.engines.sglang import compare as sglang_compare

# What a bucket costs beside its bytes weighs in smaller ones (docs/log.md: 0.25 to 4 GiB).
BUCKET_BYTES = 2 * 2**30


def plan_buckets(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[str]]:
    """Cut parameters, in order, into runs of at most `bucket_bytes`; one too large goes alone."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(name)
        room -= num_bytes
    return buckets


def views(flat_N: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Windows of these shapes onto a flat buffer, one after the other."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat_N.split(sizes), shapes, strict=True)]


def fill(
    sources: Iterable[Tensor],
    shapes: Sequence[torch.Size],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A fresh flat buffer with these tensors in it, cast to `dtype`, its values final.

    Fresh each time: the engine may still read the last one, whose handle counts its readers.
    """
    flat_N = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
    for view, source in zip(views(flat_N, shapes), sources, strict=True):
        view.copy_(source)
    if flat_N.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return flat_N


def collect(device: torch.device) -> None:
    """Let go of buffers that the engine has closed; else each push would leak its buckets."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def serialise(flat_N: Tensor, names: Sequence[str], shapes: Sequence[torch.Size]) -> bytes:
    """One payload for one rank of the engine. Make a fresh one for each rank: a handle is opened
    once.

    On CUDA the payload is a handle, so `flat_N` must hold its final values (synchronize first),
    must not be written again, and must live until the engine has answered.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, start = [], 0
    for name, shape in zip(names, shapes, strict=True):
        num_bytes = math.prod(shape) * flat_N.element_size()
        metadata.append(
            FlattenedTensorMetadata(
                name=name,
                shape=shape,
                dtype=flat_N.dtype,
                start_idx=start,
                end_idx=start + num_bytes,
                numel=num_bytes,
            )
        )
        start += num_bytes
    return _payload({"flattened_tensor": flat_N.view(torch.uint8), "metadata": metadata}, flat_N)


def serialise_compared(
    buffer_B: Tensor, names: Sequence[str], shapes: Sequence[torch.Size], *, rank: int, ranks: int
) -> bytes:
    """A payload like `serialise`'s of a buffer that `sglang_compare` reads: slots, then values."""
    described = sglang_compare.describe(names, shapes, rank=rank, ranks=ranks)
    return _payload([(described, buffer_B)], buffer_B)


def _payload(message: Any, shared: Tensor) -> bytes:
    """The message with a handle to the tensor in it that is shared."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if shared.is_cuda:
        # Names devices by UUID, since their numbers may differ in the engine.
        monkey_patch_torch_reductions()
        return bytes(MultiprocessingSerializer.serialize(message))
    # Only our own children could open a file descriptor; a file in shared memory any process can.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    payload = bytes(MultiprocessingSerializer.serialize(message))
    torch.multiprocessing.set_sharing_strategy(strategy)
    return payload


def settled(updated: Callable[[], tuple[bool, str]]) -> Callable[[], None]:
    """Waits like `updated`; RuntimeError when the engine refused the bucket."""

    def finish() -> None:
        success, message = updated()
        if not success:
            raise RuntimeError(f"the engine refused a bucket: {message}")

    return finish


class Ledger:
    """Which parameters the engine holds, by name: a push must bring each exactly once.

    SGLang only warns of names it does not know and says nothing of names it misses.
    """

    def __init__(self, expected: Mapping[str, torch.Size], *, complete: bool) -> None:
        self.expected = dict(expected)
        self._missing = set() if complete else set(expected)

    @property
    def complete(self) -> bool:
        """Whether the engine holds one version of every parameter."""
        return not self._missing

    def check_names(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ValueError unless these are exactly the engine's parameters."""
        unknown = sorted(shapes.keys() - self.expected.keys())
        missing = sorted(self.expected.keys() - shapes.keys())
        wrong = [f"{n} {list(s)}" for n, s in shapes.items() if self.expected.get(n, s) != s]
        if unknown or missing or wrong:
            raise ValueError(
                f"a push must carry the engine's {len(self.expected)} parameters, got "
                f"{len(shapes)}: unknown {unknown[:3]}, missing {missing[:3]}, of another shape "
                f"{wrong[:3]}"
            )

    def expect(self, names: Sequence[str]) -> bool:
        """A bucket is about to come; whether it is the last. A first one makes all others owed."""
        if self.complete:
            self.lose()
        unknown = sorted(set(names) - self._missing)
        if unknown:
            raise ValueError(f"a bucket brings parameters unknown or brought before: {unknown[:3]}")
        return not self._missing.difference(names)

    def receive(self, names: Sequence[str]) -> None:
        """The bucket has come."""
        self._missing.difference_update(names)

    def lose(self) -> None:
        """What the engine holds is void."""
        self._missing = set(self.expected)


def engine_layout(
    named: Mapping[str, Tensor], config: Any, *, tp_size: int, tp_rank: int
) -> Iterator[tuple[str, Tensor]]:
    """What rank `tp_rank` of the engine must hold after a push of `named`, under the engine's own
    names.

    For dense Llama, Qwen2 and Qwen3: q, k and v become one tensor, gate and up become one, both cut
    by output rows; o and down are cut by input columns; embedding and head by vocabulary rows, the
    whole vocabulary padded with zeros to a multiple of 64. With more ranks than key heads,
    neighbouring ranks hold the same key head.
    """

    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads

    def rows(tensor: Tensor, unit: int, num_units: int) -> Tensor:
        """This rank's units of `unit` rows; fewer units than ranks are repeated."""
        share = max(1, num_units // tp_size)
        first = tp_rank * num_units // tp_size
        return tensor[first * unit : (first + share) * unit]

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp_size, dim=1)[tp_rank]

    for name, tensor in named.items():
        stem, _, leaf = name.rpartition(".")
        parent, _, module = stem.rpartition(".")
        if module == "q_proj":
            key, value = named[f"{parent}.k_proj.{leaf}"], named[f"{parent}.v_proj.{leaf}"]
            parts = [rows(tensor, head_dim, num_heads)]
            parts += [rows(other, head_dim, num_kv_heads) for other in (key, value)]
            yield f"{parent}.qkv_proj.{leaf}", torch.cat(parts)
        elif module == "gate_proj":
            up = named[f"{parent}.up_proj.{leaf}"]
            yield (
                f"{parent}.gate_up_proj.{leaf}",
                torch.cat([t.chunk(tp_size)[tp_rank] for t in (tensor, up)]),
            )
        elif module in ("k_proj", "v_proj", "up_proj"):
            continue
        elif module in ("o_proj", "down_proj") and leaf == "weight":
            yield name, columns(tensor).contiguous()
        elif module in ("embed_tokens", "lm_head"):
            padding = -len(tensor) % 64
            padded = (
                torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
                if padding
                else tensor
            )
            yield name, padded.chunk(tp_size)[tp_rank].contiguous()
        else:
            yield name, tensor


def fingerprint(tensor: Tensor) -> str:
    """The engine's own hash of a tensor's values: compares both sides without moving weights."""
    from sglang.srt.managers.mm_utils import tensor_hash

    return f"{tensor_hash(tensor.contiguous()):016x}"
