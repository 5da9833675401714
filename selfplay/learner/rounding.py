"""AdamW on bf16 weights with stochastic rounding, so that small updates are not lost.

A step at lr 1e-6 moves a weight near 1 by 1/4,000 of the distance between two bf16 numbers.
Rounding to the nearest would lose every such step. With stochastic rounding (up with a probability
equal to the fraction of that distance) a weight moves by the right amount on average. The moments
stay in fp32: 12 bytes a weight with its gradient, while fp32 weights take 16 and a bf16 copy for
computation. Every draw has a named seed, so a run resumes bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfplay.data.seeds import named_seed
from selfplay.distributed import local_part, shard_index

EPS = 1e-8  # torch's default


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW without weight decay (Loshchilov & Hutter 2019, algorithm 2), in fp32, on fp32 or bf16
    weights.

    A step rounds bf16 weights stochastically. The draws are seeded by `seed`, the step, the
    weight's number and the shard's index, so ranks with the same values round them equally.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on every weight that has a gradient."""
        assert closure is None
        number = -1
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    self._step_one(weight, weight.grad, group, number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but moments stay in fp32; torch casts them to the dtype of their weight."""
        super().load_state_dict(state_dict)
        weights = [w for group in self.param_groups for w in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for weight, key in zip(weights, keys, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[weight][name] = value.detach().clone()

    def _step_one(self, weight: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, dtype=torch.float32)
        state["step"] += 1
        step = int(state["step"])
        (beta1, beta2), lr = group["betas"], group["lr"]
        mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        grad = local_part(grad).float()
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(EPS)
        moved = local_part(weight).float()
        moved.addcdiv_(mean, scale, value=-lr / (1 - beta1**step))
        self._store(weight, moved, number)

    def _store(self, weight: Tensor, moved: Tensor, number: int) -> None:
        """Write this rank's fp32 values of a weight after its step, rounded if it is bf16."""
        if weight.dtype == torch.bfloat16:
            step = int(self.state[weight]["step"])
            seed = named_seed("rounding", self._seed, step, number, shard_index(weight))
            moved = rounded(moved, seed=seed)
        local_part(weight).copy_(moved)


def rounded(exact: Tensor, *, seed: int) -> Tensor:
    """fp32 to bf16 by stochastic rounding, whose mean is the exact value.

    A bf16 number is an fp32 number without its last 16 bits. Adding 16 random bits carries into the
    upper bits with probability (last 16 bits) / 2^16. Infinities and numbers that bf16 can
    represent do not change.
    """
    generator = torch.Generator(exact.device).manual_seed(seed)
    noise = torch.randint(
        0, 2**16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator
    )
    bits = exact.contiguous().view(torch.int32)
    upper = torch.where(exact.isfinite(), bits + noise, bits) & -(2**16)
    return upper.view(torch.float32).to(torch.bfloat16)
