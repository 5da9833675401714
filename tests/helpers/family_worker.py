"""Run as two ranks by test_families.py: families on a mesh against one eager process.

Usage: tests/helpers/family_worker.py TP NAME... FOLDER, on each rank. Rank 0 writes
FOLDER/report.json: for each family the largest difference, of log-probs in nats and of gradients as
a share of each tensor's largest entry, or the error it ended in.
"""

import json
import sys
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


def main() -> None:
    tp, names, home = int(sys.argv[1]), sys.argv[2:-1], Path(sys.argv[-1])
    world = init_world(tp, device="cpu")
    report: dict[str, float | str] = {}
    for name in names:
        folder = home / name
        if world.rank == 0:
            random_folder(name, folder)
        barrier(world)
        try:
            model = load_sharded(
                str(folder), world, master_dtype=torch.float32, compute_dtype=torch.float32
            ).eval()
            with torch.no_grad():
                gap = packed_logprobs(model, TEXTS) - eager_logprobs(folder, TEXTS)
            report[name] = max(gap.abs().max().item(), gradient_gap(model, folder, world))
        except Exception as error:  # noqa: BLE001 — the report says what a family ends in
            report[name] = f"{type(error).__name__}: {error}"
        barrier(world)
    if world.rank == 0:
        (home / "report.json").write_text(json.dumps(report, indent=1))
    close_world(world)


if __name__ == "__main__":
    main()
