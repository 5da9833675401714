"""What waits on the host comes back bit for bit; on a CPU, whose own storages are emptied here."""

from __future__ import annotations

import pytest
import torch
from tiny_run import CPU, tiny_model

from selfplay.colocation.offload import HostStore, Offload
from selfplay.config import OptimConfig
from selfplay.distributed import init_world
from selfplay.learner.learner import Learner
from selfplay.learner.optimizer import make_optimizer


def held_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().size() for tensor in tensors)


def test_stowed_tensors_hold_nothing_and_come_back_bit_for_bit() -> None:
    tensors = [torch.randn(3, 5), torch.arange(7), torch.randn(4).bfloat16(), torch.tensor(1.5)]
    before = [tensor.clone() for tensor in tensors]
    parked = HostStore("cpu")
    for _ in range(3):
        parked.offload(tensors)
        assert held_bytes(tensors) == 0
        parked.onload()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_tensors_that_share_a_storage_move_once() -> None:
    whole = torch.arange(10.0)
    parked = HostStore("cpu")
    parked.offload([whole[:4], whole[4:], whole])
    assert parked._host is not None and len(parked._host) == 10 * 4
    parked.onload()
    assert whole.tolist() == list(range(10))


def test_the_host_buffer_is_kept_and_grows_with_what_is_stowed() -> None:
    """An optimizer's state is there only after its first step."""
    first, second = torch.ones(4), torch.full((6,), 2.0)
    parked = HostStore("cpu")
    parked.offload([])
    parked.onload()
    parked.offload([first])
    parked.onload()
    small = parked._host
    parked.offload([first])
    assert parked._host is small
    parked.offload([second])  # something is stowed already
    assert held_bytes([second]) == 6 * 4
    parked.onload()
    parked.offload([first, second])
    assert parked._host is not None and len(parked._host) == 10 * 4
    parked.onload()
    assert first.tolist() == [1] * 4 and second.tolist() == [2] * 6


@pytest.mark.parametrize("parameters", [False, True])
def test_an_update_after_each_play_is_the_update_without(parameters: bool) -> None:
    """Three steps with everything but what is asked to stay sent away in between."""

    def trained(*, away: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = tiny_model()
        optimizer = make_optimizer(model, OptimConfig(lr=1e-2))
        learner = Learner(model, optimizer, init_world(device="cpu"), torch.float32)
        offload = Offload(learner, state=away, reference=True, parameters=away and parameters)
        offload._state_store, offload._parameter_store = HostStore("cpu"), HostStore("cpu")
        for step in range(3):
            model(torch.arange(8, device=CPU)[None] + step).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            offload.offload_state()
            offload.offload_parameters()
            assert (held_bytes(list(model.parameters())) == 0) == (away and parameters)
            offload.onload()
        return [p.detach().clone() for p in model.parameters()]

    pairs = zip(trained(away=True), trained(away=False), strict=True)
    assert all(torch.equal(mine, yours) for mine, yours in pairs)
