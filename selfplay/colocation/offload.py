"""Parameters, optimizer state, critic and reference wait in pinned host memory while others need
the GPU.

A tensor's storage is emptied in place and filled again, so whoever holds the tensor (FSDP, the
optimizer) need not know. Bytes move on the current stream; sizes in bytes. On a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from selfplay.distributed import local_part
from selfplay.learner.learner import Learner


class HostStore:
    """Tensors of one kind of device that can be stowed on the host and fetched back, any number of
    times.

    One host buffer holds them all and is kept: pinning memory takes far longer than a copy, and
    torch rounds each pinned allocation up to a power of two.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self._kind = kind
        self._host: Tensor | None = None
        self._held: list[tuple[Tensor, Tensor]] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy to the host and empty the storages; tensors that share a storage move once. Does
        nothing while something is stowed."""
        if self._held:
            return
        wholes = self._storages(tensors)
        if not wholes:
            return
        total = sum(len(whole) for whole in wholes)
        if self._host is None or len(self._host) < total:
            self._host = None  # let go of the old one before asking for more
            self._host = torch.empty(total, dtype=torch.uint8, pin_memory=self._kind == "cuda")
        hosts = self._host[:total].split([len(whole) for whole in wholes])
        for whole, host in zip(wholes, hosts, strict=True):
            host.copy_(whole, non_blocking=True)
        self._meet()
        self._held = list(zip(wholes, hosts, strict=True))
        for whole in wholes:
            whole.untyped_storage().resize_(0)

    def onload(self) -> None:
        """Fill the storages again."""
        for whole, host in self._held:
            whole.untyped_storage().resize_(len(host))
            whole.copy_(host, non_blocking=True)
        if self._held:
            self._meet()
        self._held = []

    def _storages(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The bytes of each storage, once."""
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            local = local_part(tensor)
            storage = local.untyped_storage()
            if local.device.type == self._kind and storage.size():
                empty = torch.empty(0, dtype=torch.uint8, device=local.device)
                found.setdefault(storage.data_ptr(), empty.set_(storage))
        return list(found.values())

    def _meet(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize()


class Offload:
    """What the settings send to the host while the engine plays; all is back before an update."""

    def __init__(
        self, learner: Learner, *, state: bool, reference: bool, parameters: bool = False
    ) -> None:
        self._learner = learner
        self._state, self._reference, self._parameters = state, reference, parameters
        self._state_store, self._parameter_store = HostStore(), HostStore()

    def offload_state(self) -> None:
        """After the update: optimizer state and critic, and the reference, leave the GPU, each if
        the settings say so."""
        kept: list[Tensor] = []
        if self._state:
            kept += _tensors(self._learner.optimizer)
            if self._learner.critic is not None:
                kept += _tensors(self._learner.critic.optimizer)
                kept += self._learner.critic.module.parameters()
        reference = self._learner.reference
        # With adapters the reference is the policy itself.
        if self._reference and reference is not None and reference is not self._learner.model:
            kept += reference.parameters()
        self._state_store.offload(kept)

    def offload_parameters(self) -> None:
        """After the push: the policy's own weights leave the GPU, if the settings say so."""
        if self._parameters:
            self._parameter_store.offload(self._learner.model.parameters())

    def onload(self) -> None:
        """Before an update, a checkpoint or an export: everything comes back."""
        self._parameter_store.onload()
        self._state_store.onload()


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
