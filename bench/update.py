"""Measures time and memory of the update: log-probs of packed rows, backward, optimizer step.

Uses real Qwen2.5 shapes with random weights, so nothing is downloaded. A row holds sequences of one
length, all trained; each pass has rows of another length, as in a run. With --groups the
transcripts of a group share a prompt, the parts after it have geometric lengths, and every second
token of a part is trained; each case is then measured with `optim.share_prefixes` off and on.
Utilisation counts 6 operations per weight and computed token (for the head, per trained token) plus
causal attention, divided by the operations per second of a large matmul in the same run; recomputed
activations do not count. `launch_s` is the time of a pass over one sequence: nearly all of it is
the CPU's time to launch a pass's kernels.

    python -m bench.update                                    one GPU, every shape
    torchrun --nproc-per-node 4 -m bench.update --tp 2        a 2 x 2 mesh
    python -m bench.update --groups 16 --shapes 0.5B --liger on --checkpointing none
    python -m bench.update --dry-run                          a tiny shape on a CPU

Rank 0 prints one line per case and writes JSON lines to --out. Seconds end in _s.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from bench.rows import SHAPES, count, group_arguments, keep, show


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    add(
        "--tokens", nargs="+", type=count, default=[16_384, 32_768], help="computed tokens of a row"
    )
    add("--seq-len", type=count, default=1536, help="without --groups")
    add("--liger", nargs="+", choices=["off", "on"], default=["off", "on"])
    add("--checkpointing", nargs="+", default=["none", "full"], choices=["none", "half", "full"])
    add("--master", choices=["float32", "bfloat16"], default="float32")
    add("--tp", type=int, default=1)
    add("--steps", type=count, default=5, help="timed steps, after 2 for warm-up")
    add("--out", type=Path, default=None, help="append JSON lines to this file")
    add("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    group_arguments(parser, groups=0)
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shapes, chosen.tokens, chosen.seq_len = ["tiny"], [256, 512], 60
        chosen.liger, chosen.steps = ["off"], 2
        chosen.prompt, chosen.own = 64, 32
    return chosen


if __name__ == "__main__":  # --help and a mistake are answered before torch is imported
    arguments()

# isort: split
import torch

from bench.shapes import random_model
from selfplay.advantages.sample import Sample
from selfplay.distributed import World, all_reduce_max, clip_grad_norm, close_world, init_world
from selfplay.learner.batch import MicroBatch, micro_batches, pack
from selfplay.model.attention import attention_backend
from selfplay.model.policy import policy_logprobs

GIB = 2**30


def sequences(num_tokens: int, length: int, vocab: int, world: World) -> list[Sample]:
    """Random sequences of one length, the last one shorter, trained at every token but the first;
    equal on all ranks of a tp group."""
    draws = random.Random(world.dp_rank)
    bounds = [*range(0, num_tokens, length), num_tokens]
    return [
        _sample(f"{start}", [draws.randrange(vocab) for _ in range(end - start)], first=1, every=1)
        for start, end in pairwise(bounds)
        if end - start > 1
    ]


def transcripts(options: argparse.Namespace, vocab: int) -> list[Sample]:
    """The groups' samples: a shared prompt, then turns with every second token trained."""
    draws = random.Random(0)
    samples = []
    for group in range(options.groups):
        prompt = [draws.randrange(3, vocab) for _ in range(options.prompt)]
        for one in range(options.group_size):
            num = min(4 * options.own, 2 + int(draws.expovariate(1.0 / (options.own - 2))))
            ids = prompt + [draws.randrange(3, vocab) for _ in range(num)]
            samples.append(_sample(f"{group}.{one}", ids, first=options.prompt + 1, every=2))
    return samples


def without_end(samples: Sequence[Sample], num: int) -> list[Sample]:
    """The samples without their last `num` tokens; each keeps its first trained one."""
    shorter = []
    for sample in samples:
        end = max(len(sample.ids) - num, sample.mask.index(1) + 1)
        zeros = [0.0] * end
        shorter.append(Sample(sample.name, sample.ids[:end], sample.mask[:end], zeros, zeros))
    return shorter


def _sample(name: str, ids: list[int], *, first: int, every: int) -> Sample:
    mask = [int(i >= first and (i - first) % every == 0) for i in range(len(ids))]
    zeros = [0.0] * len(ids)
    return Sample(name, ids, mask, zeros, zeros)


def operations(name: str, batches: Sequence[MicroBatch]) -> float:
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
        # Forward, QK^T and AV: 2 products of 2 operations per channel and pair. The backward pass
        # has twice as many.
        total += 12.0 * pairs * width * layers
    return total


def matmul_peak(device: torch.device) -> float:
    """Operations per second of a large square matmul in the compute dtype."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = timed(lambda: left @ right, device, num=20)
    return 2.0 * size**3 / seconds


def timed(function: Callable[[], object], device: torch.device, *, num: int) -> float:
    """Median seconds of `num` runs, after two runs for warm-up."""
    seconds = []
    for _ in range(num + 2):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def restart_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(
    name: str, tokens: int, options: argparse.Namespace, world: World, *, liger: bool,
    checkpointing: str, share: bool, peak_flops: float,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one case: seconds per part, tokens per second, utilisation, peak memory.

    The rows are one rank's; all ranks have equally many.
    """
    master = getattr(torch, options.master)
    torch.manual_seed(world.rank)  # the same weights with and without shared prefixes
    model = random_model(name, world, master=master, liger=liger, checkpointing=checkpointing)
    device, vocab = world.device, SHAPES[name][5]
    if options.groups:
        samples = transcripts(options, vocab)
    else:
        samples = sequences(tokens, options.seq_len, vocab, world)
    passes = []
    for cut in range(options.steps + 2):
        shorter = without_end(samples, 2 * cut)
        packed = micro_batches(shorter, world, budget=tokens, share_prefixes=share)
        passes.append([batch for _, batch in packed])
    batches, following = passes[0], cycle(passes)
    restart_peak(device)
    losses: list[float] = []

    def forward(batch: MicroBatch) -> torch.Tensor:
        logprobs_M, _ = policy_logprobs(model, batch.row, batch.targets_M, temperature=1.0)
        return -logprobs_M.sum()

    def forward_backward(batches: Sequence[MicroBatch]) -> None:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        num_trained = sum(len(batch.targets_M) for batch in batches)
        for batch in batches:
            loss = forward(batch) / num_trained
            (loss / world.dp_size).backward()
            total += loss.detach()
        losses.append(total.item())

    def step() -> None:
        clip_grad_norm(model, 1.0, world)
        optimizer.step()

    with torch.no_grad():
        forward_s = timed(lambda: [*map(forward, next(following))], device, num=options.steps)
    pass_s = timed(lambda: forward_backward(next(following)), device, num=options.steps)
    peak_pass_gib, loss = peak_gib(device), losses[-1]
    alone = [pack(samples[:1], device=device)]
    launch_s = timed(lambda: forward_backward(alone), device, num=options.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    step_s: float | None = None
    try:
        step_s = all_reduce_max(timed(step, device, num=options.steps), world)
    except torch.cuda.OutOfMemoryError:
        step_s = None  # no memory for the optimizer's state; report only the passes
    pass_s, forward_s = all_reduce_max(pass_s, world), all_reduce_max(forward_s, world)
    # With random weights, the loss starts near the log of the vocabulary size.
    assert abs(loss - math.log(vocab)) < 1.5, (loss, math.log(vocab))
    flops = operations(name, batches) * world.dp_size
    return {
        "shape": name,
        "mesh": f"{world.dp_size}x{world.tp}",
        "tokens": tokens,
        "liger": liger,
        "checkpointing": checkpointing,
        "share_prefixes": share,
        "master": options.master,
        "forward_s": forward_s,
        "forward_backward_s": pass_s,
        "step_s": step_s,
        "launch_s": launch_s,
        "computed_tokens": sum(len(batch.row.ids_N) for batch in batches),
        "tokens_per_s": sum(len(sample.ids) for sample in samples) * world.dp_size / pass_s,
        "utilisation": flops / pass_s / peak_flops / world.world_size,
        "loss": loss,
        "peak_pass_gib": peak_pass_gib,
        "peak_all_gib": peak_gib(device),
    }


def main() -> None:
    options = arguments()
    world = init_world(options.tp, device="cpu" if options.dry_run else None)
    peak_flops = matmul_peak(world.device)
    compute = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    if world.rank == 0:
        print(
            f"torch {torch.__version__}, {world.world_size} x {world.device.type}, "
            f"attention {attention_backend(world.device, compute)}, "
            f"matmul {peak_flops / 1e12:.0f} TFLOP/s"
        )
    # The cases without liger first: its RoPE patch affects every later model.
    on = sorted({name == "on" for name in options.liger})
    shares = [False, True] if options.groups else [False]
    for liger, name, tokens, checkpointing, share in product(
        on, options.shapes, options.tokens, options.checkpointing, shares
    ):
        restart_peak(world.device)
        try:
            row = measure(
                name, tokens, options, world, liger=liger, checkpointing=checkpointing,
                share=share, peak_flops=peak_flops,
            )  # fmt: skip
        except torch.cuda.OutOfMemoryError as error:
            if world.world_size > 1:
                raise  # the other ranks are waiting in a collective
            row = {"shape": name, "tokens": tokens, "liger": liger, "checkpointing": checkpointing}
            show(row | {"share_prefixes": share, "out of memory": str(error)[:80]})
            continue
        if world.rank == 0:
            show(row)
            keep(row, options.out)
    close_world(world)


if __name__ == "__main__":
    main()
