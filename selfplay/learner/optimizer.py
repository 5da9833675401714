"""The optimizers, AdamW and Muon.

bf16 weights are rounded stochastically, so that small updates are not lost: a step at lr 1e-6 moves
a weight near 1 by 1/4,000 of the distance between two bf16 numbers, and rounding to nearest would
lose every such step. Rounded up with a probability equal to the fraction of that distance, a weight
moves by the right amount on average. The moments stay in fp32. A weight with its gradient and
moments takes 12 bytes; an fp32 weight takes 16, plus a bf16 copy for computation. Every draw has a
named seed, so a run resumes bit for bit.

Shapes: B matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from selfplay.config import OptimConfig
from selfplay.data.seeds import named_seed
from selfplay.distributed import box_at, gather_flat, local_part, shard_index, sharded_as
from selfplay.model.lora import own_parameters

BETAS = (0.9, 0.95)  # AdamW's
EPS = 1e-8  # torch's default
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, by torch's names
MOMENTUM = 0.95  # Muon's
# Jordan et al.'s quintic iteration; five iterations bring singular values of 0.01 to 1 close to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
ADAMW_RMS = 0.2  # the usual RMS of AdamW's step, in learning rates (Liu et al. 2025)
MAX_AT_ONCE = 2**28  # elements of full matrices that a rank holds at once


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    lr: float | None = None,
    seed: int = 0,
    kind: str = "adamw",
    policy: str = "",
) -> torch.optim.Optimizer:
    """AdamW or Muon over the parameters that are not frozen and not the adapters of another policy,
    without weight decay.

    With `kind="muon"`, for a language model, matrices other than embedding and output layer take
    Muon's steps, all other weights AdamW's. `lr` overrides the settings. `seed` seeds the
    stochastic rounding of bf16 weights.
    """
    trained = own_parameters(model, policy).values()
    weights = sorted(trained, key=lambda p: p.ndim < 2)  # their order numbers the rounding's draws
    groups: list[dict[str, Any]] = [{"params": weights}]
    rate = config.lr if lr is None else lr
    if kind == "muon":
        assert isinstance(model, PreTrainedModel)
        inside = matrices_inside(model)
        orthogonal = {id(p) for p in inside}
        groups[0]["params"] = [p for p in weights if id(p) not in orthogonal]
        groups.append({"params": inside, "orthogonal": True})
        return Muon(groups, lr=rate, betas=BETAS, seed=seed)
    if config.master_dtype == "bfloat16":
        return RoundedAdamW(groups, lr=rate, betas=BETAS, seed=seed)
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=0.0, fused=True)


def matrices_inside(model: PreTrainedModel) -> list[nn.Parameter]:
    """The trained matrices of a language model other than its embedding and output layer."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad)
    return [p for p in trained if p.ndim == 2 and id(p) not in ends]


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW without weight decay (Loshchilov & Hutter 2019, algorithm 2), computed in fp32, on fp32
    or bf16 weights.

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
        """As torch's, but moments stay in fp32; torch casts them to the dtype of their weight."""
        super().load_state_dict(state_dict)
        weights = [w for group in self.param_groups for w in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for weight, key in zip(weights, keys, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[weight][name] = value.detach().clone()

    def _state_of(
        self, weight: Tensor, *names: str, device: torch.device | None = None
    ) -> dict[str, Any]:
        """The weight's state; at first step 0, on `device`, and fp32 zeros under these names."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {name: torch.zeros_like(weight, dtype=torch.float32) for name in names}
        return state

    def _step_one(self, weight: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self._state_of(weight, *MOMENTS)
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
        """Write this rank's fp32 values of a weight after its step, rounded for bf16."""
        if weight.dtype == torch.bfloat16:
            step = int(self.state[weight]["step"])
            seed = named_seed("rounding", self._seed, step, number, shard_index(weight))
            moved = rounded(moved, seed=seed)
        local_part(weight).copy_(moved)


def rounded(exact: Tensor, *, seed: int) -> Tensor:
    """fp32 to bf16 by stochastic rounding; the expected result is the exact value.

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


class Muon(RoundedAdamW):
    """Muon on the weights of groups with `orthogonal: True`, AdamW on all others.

    The momentum of a matrix is replaced by the nearest matrix whose singular values are all about
    one, so that rare directions of the gradient get as large a step as frequent ones (Jordan et al.
    2024, "Muon: An optimizer for hidden layers in neural networks"). The step is scaled to AdamW's
    usual RMS (Liu et al. 2025, "Muon is scalable for LLM training", eq. 4), so that both share a
    learning rate.

    The momentum of a sharded matrix is gathered; every rank computes the full step and applies its
    own shard. All ranks must call `step` together. The state of a matrix is its fp32 momentum.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        number = 0
        for group in self.param_groups:
            numbered = enumerate(group["params"], number)
            number += len(group["params"])
            moving = [(at, weight) for at, weight in numbered if weight.grad is not None]
            if not group.get("orthogonal"):
                self._step_others(moving, group)
                continue
            moving.sort(key=lambda entry: tuple(entry[1].shape))
            for shape, same in groupby(moving, key=lambda entry: tuple(entry[1].shape)):
                entries, size = list(same), max(1, MAX_AT_ONCE // math.prod(shape))
                for start in range(0, len(entries), size):
                    self._step_matrices(entries[start : start + size], group)

    def _step_others(self, entries: Sequence[tuple[int, Tensor]], group: dict[str, Any]) -> None:
        """AdamW's step; one fused kernel for fp32 weights."""
        exact = []
        for number, weight in entries:
            assert weight.grad is not None
            if weight.dtype == torch.float32:
                exact.append(weight)
            else:
                self._step_one(weight, weight.grad, group, number)
        if not exact:
            return
        held = [self._state_of(weight, *MOMENTS, device=weight.device) for weight in exact]
        adamw(
            [local_part(weight) for weight in exact],
            [local_part(weight.grad) for weight in exact if weight.grad is not None],
            [local_part(state["exp_avg"]) for state in held],
            [local_part(state["exp_avg_sq"]) for state in held],
            [],
            [state["step"] for state in held],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=EPS,
            maximize=False,
        )

    def _step_matrices(self, entries: Sequence[tuple[int, Tensor]], group: dict[str, Any]) -> None:
        """Step weights of one shape [R, C]."""
        weights, lr = [weight for _, weight in entries], group["lr"]
        rows, columns = weights[0].shape
        dtype = torch.bfloat16 if weights[0].is_cuda else torch.float32
        flat_N = gather_flat(self._directions(weights), dtype=dtype, device=weights[0].device)
        steps_BRC = orthogonalized(flat_N.view(len(weights), rows, columns)).float()
        steps = [
            step_RC[box_at(weight, shard_index(weight))] if isinstance(weight, DTensor) else step_RC
            for weight, step_RC in zip(weights, steps_BRC, strict=True)
        ]
        local = [local_part(weight) for weight in weights]
        moved = [values.float() for values in local]  # copies bf16 values, not fp32 ones
        torch._foreach_add_(moved, steps, alpha=-lr * ADAMW_RMS * max(rows, columns) ** 0.5)
        if weights[0].dtype != torch.float32:
            for (number, weight), exact in zip(entries, moved, strict=True):
                self._store(weight, exact, number)

    def _directions(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Nesterov's momentum of each gradient, sharded like its weight."""
        states = [self._state_of(weight, "momentum") for weight in weights]
        for state in states:
            state["step"] += 1
        grads = [local_part(weight.grad).float() for weight in weights if weight.grad is not None]
        momenta = [local_part(state["momentum"]) for state in states]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        directions = torch._foreach_lerp(grads, momenta, MOMENTUM)
        return [sharded_as(*pair) for pair in zip(directions, weights, strict=True)]


def orthogonalized(matrices_BRC: Tensor) -> Tensor:
    """Approximately U V' for each matrix U S V': singular values above 1/100 of the Frobenius norm
    become 0.68 to 1.21. A zero matrix stays zero."""
    a, b, c = COEFFICIENTS
    tall = matrices_BRC.shape[1] > matrices_BRC.shape[2]
    X = matrices_BRC.mT if tall else matrices_BRC
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if tall else X
