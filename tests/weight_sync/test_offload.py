"""Offloaded tensors come back bit for bit. Here the storages of CPU tensors are emptied."""

import pytest
import torch

from selfplay.config import OptimConfig, ParallelConfig
from selfplay.distributed import init_world
from selfplay.learner.learner import Learner
from selfplay.learner.optimizer import make_optimizer
from selfplay.weight_sync.offload import HostStore, Offload
from tests.helpers.tiny_run import CPU, tiny_model


def held_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().size() for tensor in tensors)


def test_offloaded_tensors_hold_nothing_and_come_back_bit_for_bit() -> None:
    tensors = [torch.randn(3, 5), torch.arange(7), torch.randn(4).bfloat16(), torch.tensor(1.5)]
    before = [tensor.clone() for tensor in tensors]
    store = HostStore("cpu")
    for _ in range(3):
        store.offload(tensors)
        assert held_bytes(tensors) == 0
        store.onload()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_tensors_that_share_a_storage_move_once() -> None:
    shared = torch.arange(10.0)
    store = HostStore("cpu")
    store.offload([shared[:4], shared[4:], shared])
    assert store._host is not None and len(store._host) == 10 * 4
    store.onload()
    assert shared.tolist() == list(range(10))


@pytest.mark.parametrize("parameters", [False, True])
def test_offloading_between_updates_changes_nothing(parameters: bool) -> None:
    """Three steps with offload and onload between them give the weights of three steps without."""

    def trained(*, offloaded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = tiny_model()
        optimizer = make_optimizer(model, OptimConfig(lr=1e-2))
        learner = Learner(model, optimizer, init_world(device="cpu"), torch.float32)
        kind = "none" if not offloaded else "all" if parameters else "optimizer"
        offload = Offload(learner, ParallelConfig(offload=kind))
        offload._state_store, offload._parameter_store = HostStore("cpu"), HostStore("cpu")
        for step in range(3):
            model(torch.arange(8, device=CPU)[None] + step).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            offload.offload_state()
            offload.offload_parameters()
            assert (held_bytes(list(model.parameters())) == 0) == (offloaded and parameters)
            offload.onload()
        return [p.detach().clone() for p in model.parameters()]

    pairs = zip(trained(offloaded=True), trained(offloaded=False), strict=True)
    assert all(torch.equal(with_it, without) for with_it, without in pairs)
