"""Muon: orthogonal steps for the matrices inside a model, AdamW for all its other weights.

The momentum of a matrix is replaced by the nearest matrix whose singular values are all about one,
so that rare directions of the gradient get as large a step as frequent ones (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks"). Its length is that of AdamW's usual step
(Liu et al. 2025, "Muon is scalable for LLM training", eq. 4), so that both share a learning rate.
Knows no models.

Shapes: B matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from selfplay.data.seeds import named_seed
from selfplay.distributed import box_at, gather_flat, local_part, place_of
from selfplay.learner.rounding import RoundedAdamW, rounded

MOMENTUM = 0.95
# Jordan et al.'s quintic iteration; five of them take singular values of 0.01 to 1 near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
ADAMW_RMS = 0.2  # the root mean square of AdamW's usual step, in learning rates (Liu et al. 2025)
MOST_AT_ONCE = 2**28  # elements of full matrices that a rank holds at a time


class Muon(RoundedAdamW):
    """Muon on the weights of the groups with `orthogonal: True`, AdamW on those of the others.

    A sharded matrix is gathered, every rank computes its step, and takes its own part of it. Every
    rank must step together. State a matrix: its momentum, in fp32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        number, matrices = -1, list[tuple[int, Tensor, dict[str, Any]]]()
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is None:
                    continue
                if group.get("orthogonal"):
                    matrices.append((number, weight, group))
                else:
                    self._step_one(weight, weight.grad, group, number)
        matrices.sort(key=lambda entry: tuple(entry[1].shape))
        for shape, of_shape in groupby(matrices, key=lambda entry: tuple(entry[1].shape)):
            entries = list(of_shape)
            size = max(1, MOST_AT_ONCE // (shape[0] * shape[1]))
            for start in range(0, len(entries), size):
                self._step_matrices(entries[start : start + size])

    def _step_matrices(self, entries: Sequence[tuple[int, Tensor, dict[str, Any]]]) -> None:
        """Step weights of one shape [R, C]."""
        weights = [weight for _, weight, _ in entries]
        directions = [self._direction(weight) for weight in weights]
        rows, columns = weights[0].shape
        dtype = torch.bfloat16 if weights[0].is_cuda else torch.float32
        flat_N = gather_flat(directions, dtype=dtype, device=weights[0].device)
        steps_BRC = orthogonalized(flat_N.view(len(weights), rows, columns))
        length = ADAMW_RMS * max(rows, columns) ** 0.5
        for (number, weight, group), step_RC in zip(entries, steps_BRC, strict=True):
            if isinstance(weight, DTensor):
                step_RC = step_RC[box_at(weight, place_of(weight))]
            part, lr = local_part(weight), group["lr"]
            moved = part.float().mul_(1 - lr * group["weight_decay"])
            moved.add_(step_RC.float(), alpha=-lr * length)
            if weight.dtype == torch.bfloat16:
                step = int(self.state[weight]["step"])
                seed = named_seed("rounding", self._seed, step, number, place_of(weight))
                moved = rounded(moved, seed=seed)
            part.copy_(moved)

    def _direction(self, weight: Tensor) -> Tensor:
        """Nesterov's momentum of the gradient, sharded as the weight is."""
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum"] = torch.zeros_like(weight, dtype=torch.float32)
        state["step"] += 1
        part, momentum = local_part(grad).float(), local_part(state["momentum"])
        momentum.lerp_(part, 1 - MOMENTUM)
        direction = torch.lerp(part, momentum, MOMENTUM)
        if not isinstance(weight, DTensor):
            return direction
        return DTensor.from_local(
            direction,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


def orthogonalized(matrices_BRC: Tensor) -> Tensor:
    """Each matrix U S V' as about U V': singular values above a hundredth of its Frobenius norm
    come between 0.68 and 1.21. Zero stays zero."""
    a, b, c = COEFFICIENTS
    tall = matrices_BRC.shape[1] > matrices_BRC.shape[2]
    X = matrices_BRC.mT if tall else matrices_BRC
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if tall else X
