"""Muon: orthogonal steps for the matrices inside a model, AdamW for all its other weights.

The momentum of a matrix is replaced by the nearest matrix whose singular values are all about one,
so that rare directions of the gradient get as large a step as frequent ones (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks"). Its length is that of AdamW's usual step
(Liu et al. 2025, "Muon is scalable for LLM training", eq. 4), so that both share a learning rate.

Shapes: B matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from selfplay.distributed import box_at, gather_flat, local_part, shard_index, sharded_as
from selfplay.learner.rounding import EPS, RoundedAdamW

MOMENTUM = 0.95
# Jordan et al.'s quintic iteration; five iterations bring singular values of 0.01 to 1 close to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
ADAMW_RMS = 0.2  # the usual RMS of AdamW's step, in learning rates (Liu et al. 2025)
MOST_AT_ONCE = 2**28  # elements of full matrices that a rank holds at a time


class Muon(RoundedAdamW):
    """Muon on the weights of the groups with `orthogonal: True`, AdamW on those of the others.

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
                entries, size = list(same), max(1, MOST_AT_ONCE // math.prod(shape))
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
        for weight in exact:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(weight)
        held = [self.state[weight] for weight in exact]
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
        moved = [values.float() for values in local]  # fp32 values themselves, a copy of bf16
        torch._foreach_add_(moved, steps, alpha=-lr * ADAMW_RMS * max(rows, columns) ** 0.5)
        if weights[0].dtype != torch.float32:
            for (number, weight), exact in zip(entries, moved, strict=True):
                self._store(weight, exact, number)

    def _directions(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Nesterov's momentum of each gradient, sharded as its weight is."""
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["momentum"] = torch.zeros_like(weight, dtype=torch.float32)
            state["step"] += 1
        grads = [local_part(weight.grad).float() for weight in weights if weight.grad is not None]
        momenta = [local_part(self.state[weight]["momentum"]) for weight in weights]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        directions = torch._foreach_lerp(grads, momenta, MOMENTUM)
        return [sharded_as(*pair) for pair in zip(directions, weights, strict=True)]


def orthogonalized(matrices_BRC: Tensor) -> Tensor:
    """Approximately U V' for each matrix U S V': singular values above 1/100 of its Frobenius norm
    become 0.68 to 1.21. A zero matrix stays zero."""
    a, b, c = COEFFICIENTS
    tall = matrices_BRC.shape[1] > matrices_BRC.shape[2]
    X = matrices_BRC.mT if tall else matrices_BRC
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if tall else X
