"""Offload: parameters, optimizer state, critic and reference wait in pinned host memory while the
engine uses the GPU.

A tensor's storage is emptied in place and filled again, so objects that hold the tensor (FSDP, the
optimizer) need no change. Copies run on the current stream. Sizes in bytes. On a CPU nothing is
moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from selfplay.config import ParallelConfig
from selfplay.distributed import local_part
from selfplay.learner.learner import Learner
from selfplay.model.lora import own_parameters


class HostStore:
    """Offloads tensors of one kind of device to the host and onloads them, any number of times.

    One host buffer holds all tensors and is reused: pinning memory takes far longer than a copy,
    and torch rounds each pinned allocation up to a power of two.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self._kind = kind
        self._host: Tensor | None = None
        self._offloaded: list[tuple[Tensor, Tensor]] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy to the host and empty the storages; a shared storage is copied once. Does nothing if
        something is already offloaded."""
        if self._offloaded:
            return
        storages = self._storages(tensors)
        if not storages:
            return
        sizes = [len(storage) for storage in storages]
        total = sum(sizes)
        if self._host is None or len(self._host) < total:
            self._host = None  # free the old buffer before allocating a larger one
            self._host = torch.empty(total, dtype=torch.uint8, pin_memory=self._kind == "cuda")
        copies = self._host[:total].split(sizes)
        for storage, copy in zip(storages, copies, strict=True):
            copy.copy_(storage, non_blocking=True)
        self._synchronize()
        self._offloaded = list(zip(storages, copies, strict=True))
        for storage in storages:
            storage.untyped_storage().resize_(0)

    def onload(self) -> None:
        """Allocate the storages again and copy their bytes back."""
        for storage, copy in self._offloaded:
            storage.untyped_storage().resize_(len(copy))
            storage.copy_(copy, non_blocking=True)
        if self._offloaded:
            self._synchronize()
        self._offloaded = []

    def _storages(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Each distinct non-empty storage as a tensor of bytes."""
        storages: dict[int, Tensor] = {}
        for tensor in tensors:
            local = local_part(tensor)
            storage = local.untyped_storage()
            if local.device.type == self._kind and storage.size():
                empty = torch.empty(0, dtype=torch.uint8, device=local.device)
                storages.setdefault(storage.data_ptr(), empty.set_(storage))
        return list(storages.values())

    def _synchronize(self) -> None:
        if self._kind == "cuda":
            torch.cuda.synchronize()


class Shared:
    """The frozen parameters of a model that several learners may read, as the base of their
    adapters or as their reference: on the host while none of them needs it, in whatever order they
    offload and onload."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model, self.store = model, HostStore()
        self._needed_by = set[int]()

    def onload(self, learner: Learner) -> None:
        """This learner needs it from now on."""
        self._needed_by.add(id(learner))
        self.store.onload()

    def offload(self, learner: Learner) -> None:
        """This learner does not need it until it onloads it."""
        self._needed_by.discard(id(learner))
        if self.model is not None and not self._needed_by:
            self.store.offload(p for p in self.model.parameters() if not p.requires_grad)


class Offload:
    """Offloads the parts of a learner selected by the settings; onloads them before an update."""

    def __init__(
        self, learner: Learner, config: ParallelConfig, beside: Sequence[Offload] = ()
    ) -> None:
        """`beside` has the `Offload`s of other policies' learners, which may share the model or the
        reference. The learner is onloaded."""
        self._learner, self._config = learner, config
        self._state_store, self._parameter_store = HostStore(), HostStore()
        # With adapters the reference is the policy itself.
        other = None if learner.reference is learner.model else learner.reference
        held = {id(each.model): each for o in beside for each in (o._base, o._reference)}
        self._base: Shared = held.get(id(learner.model)) or Shared(learner.model)
        self._reference: Shared = held.get(id(other)) or Shared(other)
        for frozen in (self._base, self._reference):
            frozen.onload(learner)

    def offload_state(self) -> None:
        """After the update: offload the reference, what methods keep and, if configured, the
        optimizer and the critic."""
        tensors: list[Tensor] = []
        if self._config.offload != "none":
            tensors += _tensors(self._learner.optimizer)
            for _, trained in self._learner.method_modules():
                tensors += _tensors(trained.optimizer)
                tensors += trained.module.parameters()
        for method in self._learner.methods:
            tensors += method.kept.values()
        self._state_store.offload(tensors)
        self._reference.offload(self._learner)

    def offload_parameters(self) -> None:
        """After the push: offload the policy's parameters if configured."""
        if self._config.offload == "all":
            own = own_parameters(self._learner.model, self._learner.policy)
            self._parameter_store.offload(own.values())
            self._base.offload(self._learner)

    def onload(self) -> None:
        """Before an update, a checkpoint or an export: onload everything."""
        self._parameter_store.onload()
        self._state_store.onload()
        self._base.onload(self._learner)
        self._reference.onload(self._learner)


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
