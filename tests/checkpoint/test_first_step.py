"""Saving before an optimizer's first step changes nothing."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from selfplay.checkpoint import learner_state
from selfplay.config import OptimConfig
from selfplay.learner.optimizer import make_optimizer
from tests.helpers.tiny_run import PPO_RUN, finished


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_step_after_a_save_is_the_first_step(dtype: str) -> None:
    """torch gives an optimizer its state by a step with gradients of 0. If that counted, the bias
    correction of the first real step would be that of a second one: 0.73 of its length."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 4).to(getattr(torch, dtype))
    saved = deepcopy(plain)
    config = OptimConfig(lr=1e-2, master_dtype=dtype)
    optimizers = {model: make_optimizer(model, config, seed=1) for model in (plain, saved)}
    learner: Any = SimpleNamespace(model=saved, optimizer=optimizers[saved])
    learner.adapters = learner.reference = None
    learner.method_modules, learner.methods = list, ()
    moments = learner_state(learner)["optimizer"]["state"]
    assert {float(of_weight["step"]) for of_weight in moments.values()} == {0.0}
    inputs = torch.randn(3, 8, dtype=plain.weight.dtype)
    for model, optimizer in optimizers.items():
        model(inputs).square().sum().backward()
        optimizer.step()
    assert torch.equal(plain.weight, saved.weight) and torch.equal(plain.bias, saved.bias)


@pytest.mark.slow
def test_a_run_does_not_depend_on_when_it_is_saved() -> None:
    """With saves before the policy's first step, while only the critic learns."""
    often, once = (
        load_file(finished(*PPO_RUN, "steps=5", f"save_every={n}") / "final" / "model.safetensors")
        for n in (1, 5)
    )
    assert often.keys() == once.keys()
    assert all(torch.equal(often[name], weight) for name, weight in once.items())
