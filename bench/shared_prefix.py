"""Measures the savings of computing shared prompts once in the update, on real Qwen2.5 shapes.

Groups of transcripts share a prompt; the parts after it have geometric lengths of the given mean.
Weights and tokens are random; half of each part is trained. Times one update's forward and backward
passes over all groups, with `optim.share_prefixes` off and on, in micro-batches of --budget
computed tokens. Utilisation counts 6 operations per weight and computed token plus attention,
divided by the operations per second of a large matmul in the same run. `launch_s` is the time of a
pass over one transcript: nearly all of it is the CPU's time to launch a pass's kernels.

    python -m bench.shared_prefix                      one GPU, 0.5B and 7B
    python -m bench.shared_prefix --dry-run            a tiny shape on a CPU
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.rows import group_arguments
from bench.shapes import SHAPES, random_model
from bench.update import matmul_peak, memory_gib, restart_peak, timed
from selfplay.credit.sample import Sample
from selfplay.distributed import World, close_world, full_tensor, init_world
from selfplay.learner.batch import MicroBatch, micro_batches, pack, split
from selfplay.model.policy import policy_logprobs


def arguments() -> argparse.Namespace:
    parser = group_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shapes, chosen.groups, chosen.prompt, chosen.own = ["tiny"], 4, 64, 32
        chosen.budget = 2048
    return chosen


def transcripts(options: argparse.Namespace, vocab: int) -> list[Sample]:
    """The groups' samples: a shared prompt, then turns of which every second token is trained."""
    draws = random.Random(0)
    samples = []
    for group in range(options.groups):
        prompt = [draws.randrange(3, vocab) for _ in range(options.prompt)]
        for one in range(options.group_size):
            num = min(4 * options.own, 2 + int(draws.expovariate(1.0 / (options.own - 2))))
            ids = prompt + [draws.randrange(3, vocab) for _ in range(num)]
            mask = [0] * options.prompt + [i % 2 for i in range(num)]
            zeros = [0.0] * len(ids)
            samples.append(Sample(f"{group}.{one}", ids, mask, zeros, zeros))
    return samples


def operations(name: str, batches: list[MicroBatch]) -> float:
    """The operations of a forward and backward pass over computed tokens."""
    width, layers, heads, kv_heads, mlp_width, vocab, _ = SHAPES[name]
    head = width // heads
    a_layer = width * head * (2 * heads + 2 * kv_heads) + 3 * width * mlp_width
    total = 0.0
    for batch in batches:
        row = batch.row
        queries = row.cu_seqlens_S1.diff().double()
        keys = (row.prefixes or row).cu_seqlens_S1.diff().double()
        pairs = float((queries * (keys - queries) + queries * queries / 2).sum())
        total += 6.0 * (a_layer * layers * len(row.ids_N) + vocab * width * len(batch.targets_M))
        total += 12.0 * pairs * width * layers
    return total


def measure(
    name: str, model: PreTrainedModel, samples: list[Sample], options: argparse.Namespace,
    world: World, *, share: bool, peak: float,
) -> tuple[dict[str, Any], torch.Tensor]:  # fmt: skip
    """The measurements of one update's passes; the gradient of one layer's query projection."""
    device = world.device
    plan = split(samples, budget=options.budget, share=share)
    batches = list(micro_batches(samples, plan, device=device, share=share))
    num = sum(len(batch.targets_M) for batch in batches)
    losses: list[float] = []

    def update(batches: list[MicroBatch]) -> None:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for batch in batches:
            logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
            loss = logprobs_M.sum() / -num
            loss.backward()
            total += loss.detach()
        losses.append(total.item())

    restart_peak(device)
    seconds = timed(lambda: update(batches), device, num=options.steps)
    peak_gib, loss = memory_gib(device, peak=True), losses[-1]
    gradient = model.get_parameter("model.layers.1.self_attn.q_proj.weight").grad
    assert gradient is not None
    flat = full_tensor(gradient).float().flatten().clone()
    alone = [pack(samples[:1], device=device)]
    figures: dict[str, Any] = {
        "shape": name,
        "share_prefixes": share,
        "seconds": seconds,
        "computed_tokens": sum(len(batch.row.ids_N) for batch in batches),
        "tokens_per_s": sum(len(sample.ids) for sample in samples) / seconds,
        "utilisation": operations(name, batches) / seconds / peak,
        "launch_s": timed(lambda: update(alone), device, num=options.steps),
        "peak_gib": peak_gib,
        "loss": loss,
    }
    return figures, flat


def main() -> None:
    options = arguments()
    world = init_world(1, device="cpu" if options.dry_run else None)
    peak = matmul_peak(world.device)
    print(f"torch {torch.__version__}, {world.device.type}, matmul {peak / 1e12:.0f} TFLOP/s")
    for name in options.shapes:
        large = name == "7B"
        model = random_model(
            name,
            world,
            master=torch.bfloat16 if large else torch.float32,
            liger=world.device.type == "cuda",
            checkpointing="full" if large else "none",
        )
        samples = transcripts(options, SHAPES[name][5])
        plain, shared = (
            measure(name, model, samples, options, world, share=share, peak=peak)
            for share in (False, True)
        )
        for figures, _ in (plain, shared):
            print(json.dumps(figures), flush=True)
        cosine = torch.nn.functional.cosine_similarity(plain[1], shared[1], dim=0).item()
        ratio = shared[0]["tokens_per_s"], plain[0]["tokens_per_s"]
        print(f"{name}: {ratio[0] / ratio[1]:.2f} times as fast, gradient cosine {cosine:.6f}")
        del model, plain, shared
    close_world(world)


if __name__ == "__main__":
    main()
