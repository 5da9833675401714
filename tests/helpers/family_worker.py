"""Run by `ranks.py` for test_families.py: families on a mesh against one eager process.

Differences are of log-probs in nats and of gradients as a share of each tensor's largest entry.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfplay.distributed import (
    World,
    barrier,
    clip_grad_norm,
    close_world,
    full_tensor,
    init_world,
)
from selfplay.model.policy import load_sharded
from selfplay.preflight.small_copy import packed_logprobs, whole_copy
from tests.helpers.family_models import TEXTS, eager_logprobs, random_folder


def gradient_gap(model: PreTrainedModel, folder: Path, world: World) -> float:
    """Every rank has the same texts, so gradients add up to dp_size times those of one process."""
    lone = whole_copy(folder)
    packed_logprobs(lone, TEXTS).sum().backward()
    packed_logprobs(model, TEXTS).sum().backward()
    clip_grad_norm(model, float("inf"), world)
    gaps = []
    for name, parameter in model.named_parameters():
        expected = lone.get_parameter(name).grad
        found = full_tensor(parameter.grad) / world.dp_size
        # What a softmax does not move (a key's bias) has a gradient of rounding alone.
        gaps.append((found - expected).abs().max() / expected.abs().max().clamp(min=1e-2))
    return max(gap.item() for gap in gaps)


def families(tp: str, *names: str, folder: Path) -> dict[str, float | str]:
    """For each family the largest difference, or the error it ended in."""
    world = init_world(int(tp), device="cpu")
    report: dict[str, float | str] = {}
    for name in names:
        if world.rank == 0:
            random_folder(name, folder / name)
        barrier(world)
        try:
            model = load_sharded(
                str(folder / name), world, master_dtype=torch.float32, compute_dtype=torch.float32
            ).eval()
            with torch.no_grad():
                gap = packed_logprobs(model, TEXTS) - eager_logprobs(folder / name, TEXTS)
            gradient = gradient_gap(model, folder / name, world)
            report[name] = max(gap.abs().max().item(), gradient)
        except Exception as error:  # noqa: BLE001 — the report says what a family ends in
            report[name] = f"{type(error).__name__}: {error}"
        barrier(world)
    close_world(world)
    return report
