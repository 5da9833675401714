"""Optimizer state, critic and reference wait in pinned host memory while others need the GPU.

A tensor's storage is emptied in place and filled again, so whoever holds the tensor (FSDP, the
optimizer) need not know. Bytes move on the current stream; sizes in bytes. On a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from selfplay.learner import Learner


class Parked:
    """GPU tensors that can be stowed in pinned memory and fetched back, any number of times."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, int]] = []

    def stow(self, tensors: Iterable[Tensor]) -> None:
        """Copy to the host and empty the GPU storages; tensors that share a storage move once."""
        if self._held:
            return
        seen: set[int] = set()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if not local.is_cuda or storage.size() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(whole, non_blocking=True)
            self._held.append((whole, host, storage.size()))
        if self._held:
            torch.cuda.synchronize()
        for whole, _, _ in self._held:
            whole.untyped_storage().resize_(0)

    def fetch(self) -> None:
        """Fill the GPU storages again."""
        for whole, host, size in self._held:
            whole.untyped_storage().resize_(size)
            whole.copy_(host, non_blocking=True)
        if self._held:
            torch.cuda.synchronize()
        self._held = []


class Offload:
    """What the settings send to the host while the engine plays; all is back before an update."""

    def __init__(self, learner: Learner, *, state: bool, reference: bool) -> None:
        self._learner = learner
        self._state, self._reference = state, reference
        self._parked = Parked()

    def stow_state(self) -> None:
        """After the update: optimizer state and critic, and the reference, leave the GPU, each if
        the settings say so."""
        kept: list[Tensor] = []
        if self._state:
            kept += _tensors(self._learner.optimizer)
            if self._learner.critic is not None:
                kept += _tensors(self._learner.critic.optimizer)
                kept += self._learner.critic.module.parameters()
        if self._reference and self._learner.reference is not None:
            kept += self._learner.reference.parameters()
        self._parked.stow(kept)

    def fetch(self) -> None:
        """Before an update or a checkpoint: everything comes back."""
        self._parked.fetch()


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
