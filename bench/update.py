"""Measures time and memory of the update: log-probs of packed tokens, backward, optimizer step.

Uses real Qwen2.5 shapes with random weights, so nothing is downloaded. Utilisation is the
operations per second of a pass divided by those of a large matmul on this GPU in the same run. Each
pass counts 6 operations per weight and token (for the head, per trained token) plus causal
attention; recomputed activations do not count.

    python -m bench.update                                    one GPU, every shape
    torchrun --nproc-per-node 4 -m bench.update --tp 2        a 2 x 2 mesh
    python -m bench.update --shapes 0.5B --liger on --profile  where the time of a pass goes
    python -m bench.update --dry-run                          a tiny shape on a CPU

Rank 0 prints one line per case and writes JSON lines to --out. Seconds end in _s.
Shapes: N packed tokens of S sequences, M trained positions.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.rows import keep
from bench.shapes import SHAPES, random_model
from selfplay.distributed import World, all_reduce_max, clip_grad_norm, close_world, init_world
from selfplay.model.attention import attention_backend
from selfplay.model.logprob import token_logprobs
from selfplay.model.policy import policy_logprobs
from selfplay.model.row import PackedRow

GIB = 2**30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[16_384, 32_768], help="packed tokens per rank"
    )
    parser.add_argument("--seq-len", type=int, default=1536)
    parser.add_argument("--trained", type=float, default=1.0, help="share of trained tokens")
    parser.add_argument("--liger", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument(
        "--checkpointing", nargs="+", default=["none", "full"], help='"none", "full" or "every K"'
    )
    parser.add_argument("--master", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after 2 for warm-up")
    parser.add_argument("--profile", action="store_true", help="print kernels by time on rank 0")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines to this file")
    parser.add_argument("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shapes, chosen.tokens, chosen.seq_len = ["tiny"], [256, 512], 60
        chosen.liger, chosen.steps = ["off"], 2
    return chosen


def packed_batch(
    num_tokens: int, seq_len: int, trained: float, vocab: int, world: World
) -> tuple[PackedRow, torch.Tensor]:
    """A row of random sequences of one length, the last one shorter, and the target ids [M]; equal
    on all ranks of a tp group."""
    generator = torch.Generator().manual_seed(world.dp_rank)
    bounds = torch.tensor([*range(0, num_tokens, seq_len), num_tokens], dtype=torch.int32)
    ids_N = torch.randint(0, vocab, (num_tokens,), generator=generator)
    positions_N = torch.arange(num_tokens) % seq_len
    follows_N = positions_N.roll(-1) != 0
    follows_N[-1] = False
    places_M = follows_N.nonzero()[:, 0]
    keep = round(trained * len(places_M))
    places_M = places_M[torch.randperm(len(places_M), generator=generator)[:keep].sort().values]
    tensors = (ids_N, positions_N, bounds, places_M, ids_N[places_M + 1])
    ids_N, positions_N, bounds, places_M, targets_M = (t.to(world.device) for t in tensors)
    return PackedRow(ids_N, positions_N, bounds, seq_len, places_M), targets_M


def work(name: str, num_tokens: int, seq_len: int, num_trained: int) -> float:
    """The operations of a forward and backward pass over one rank's tokens."""
    width, layers, heads, kv_heads, mlp_width, vocab, _ = SHAPES[name]
    head = width // heads
    a_layer = width * head * (2 * heads + 2 * kv_heads) + 3 * width * mlp_width
    lengths = [seq_len] * (num_tokens // seq_len) + [num_tokens % seq_len]
    # Forward, QK^T and AV: 2 products of 2 L^2 operations per channel, half of them masked. The
    # backward pass has twice as many.
    attention = 3 * 2 * sum(n * n for n in lengths) * width * layers
    return 6.0 * (a_layer * layers * num_tokens + vocab * width * num_trained) + attention


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


def memory_gib(device: torch.device, *, peak: bool) -> float:
    if device.type != "cuda":
        return 0.0
    used = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
    return used(device) / GIB


def restart_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def logprob_memory(name: str, num_positions: int, device: torch.device) -> float:
    """Peak GiB of the fused log-prob, forward and backward, without inputs and their gradients."""
    width, vocab = SHAPES[name][0], SHAPES[name][5]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden_MD = torch.randn(num_positions, width, device=device, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(vocab, width, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    targets_M = torch.randint(0, vocab, (num_positions,), device=device)
    hidden_MD.grad, weight_VD.grad = torch.zeros_like(hidden_MD), torch.zeros_like(weight_VD)
    restart_peak(device)
    before = memory_gib(device, peak=False)
    logprobs_M, _ = token_logprobs(hidden_MD, weight_VD, targets_M, temperature=1.0)
    logprobs_M.sum().backward()
    synchronize(device)
    return memory_gib(device, peak=True) - before


def profile(function: Callable[[], object], wall_s: float, world: World, *, rows: int = 22) -> None:
    """Print the kernels of a pass by time, and the total time that the device is busy.

    A pass that takes much longer than its kernels waits for the CPU to launch them.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        function()
        synchronize(world.device)
    if world.rank:
        return
    averages = profiler.key_averages()
    kernels = [e for e in averages if e.self_device_time_total > 0 and not is_cpu_side(e)]
    busy_s = sum(e.self_device_time_total for e in kernels) / 1e6
    num = sum(e.count for e in kernels)
    print(f"a pass takes {wall_s * 1e3:.1f} ms unprofiled; {num} kernels, {busy_s * 1e3:.1f} ms")
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:rows]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:6d} x {event.key[:90]}")
    print("on the CPU, without the time of called functions:")
    for event in sorted(averages, key=lambda e: -e.self_cpu_time_total)[: rows // 2]:
        print(f"  {event.self_cpu_time_total / 1e3:8.2f} ms {event.count:6d} x {event.key[:90]}")


def is_cpu_side(event: Any) -> bool:
    """Whether an event is a call on the CPU and not a kernel on the device."""
    return bool(event.device_type == torch.autograd.DeviceType.CPU)


def measure(
    name: str, num_tokens: int, options: argparse.Namespace, world: World, *, liger: bool,
    checkpointing: str, peak_flops: float,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one case: seconds per part, tokens per second, utilisation, peak memory."""
    master = getattr(torch, options.master)
    model = random_model(name, world, master=master, liger=liger, checkpointing=checkpointing)
    batch = packed_batch(num_tokens, options.seq_len, options.trained, SHAPES[name][5], world)
    num_trained = len(batch[-1]) * world.dp_size
    restart_peak(world.device)

    def forward() -> torch.Tensor:
        logprobs_M, _ = policy_logprobs(model, *batch, temperature=1.0)
        return logprobs_M.sum() / -num_trained

    first_losses: list[float] = []

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        loss = forward()
        loss.backward()
        if not first_losses:
            first_losses.append(loss.item())

    with torch.no_grad():
        forward_s = timed(forward, world.device, num=options.steps)
    pass_s = timed(forward_backward, world.device, num=options.steps)
    pass_gib = memory_gib(world.device, peak=True)
    if options.profile:
        profile(forward_backward, pass_s, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        clip_grad_norm(model, 1.0, world)
        optimizer.step()

    step_s: float | None = None
    try:
        step_s = all_reduce_max(timed(step, world.device, num=options.steps), world)
    except torch.cuda.OutOfMemoryError:
        step_s = None  # there is no room for the optimizer's state; report the passes only
    pass_s, forward_s = all_reduce_max(pass_s, world), all_reduce_max(forward_s, world)
    flops = work(name, num_tokens, options.seq_len, len(batch[-1])) * world.dp_size
    # With random weights, the loss starts near the log of the vocabulary size.
    expected = math.log(SHAPES[name][5])
    assert abs(first_losses[0] * world.dp_size - expected) < 1.5, (first_losses, expected)
    return {
        "shape": name,
        "mesh": f"{world.dp_size}x{world.tp}",
        "tokens": num_tokens,
        "liger": liger,
        "checkpointing": checkpointing,
        "master": options.master,
        "forward_s": forward_s,
        "forward_backward_s": pass_s,
        "step_s": step_s,
        "tokens_per_s": num_tokens * world.dp_size / pass_s,
        "utilisation": flops / pass_s / peak_flops / world.world_size,
        "peak_pass_gib": pass_gib,
        "peak_all_gib": memory_gib(world.device, peak=True),
    }


def cases(options: argparse.Namespace) -> list[tuple[bool, str, int, str]]:
    """All cases, those without liger first: its RoPE patch affects every later model."""
    chosen = sorted({name == "on" for name in options.liger})
    return [
        (liger, name, tokens, checkpointing)
        for liger in chosen
        for name in options.shapes
        for tokens in options.tokens
        for checkpointing in options.checkpointing
    ]


def main() -> None:
    options = arguments()
    world = init_world(options.tp, device="cpu" if options.dry_run else None)
    peak_flops = matmul_peak(world.device)
    compute = torch.bfloat16 if world.device.type == "cuda" else torch.float32

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    say(
        f"torch {torch.__version__}, {world.world_size} x {world.device.type}, "
        f"attention {attention_backend(world.device, compute)}, "
        f"matmul {peak_flops / 1e12:.0f} TFLOP/s"
    )
    for name in options.shapes:
        most = max(options.tokens)
        gib = logprob_memory(name, most, world.device)
        say(f"fused log-prob, {name}, {most} positions: {gib:.2f} GiB above inputs and gradients")
    say("shape mesh tokens liger checkpointing | forward fwd+bwd step | tok/s util | GiB pass all")
    for liger, name, tokens, checkpointing in cases(options):
        restart_peak(world.device)
        head = f"{name} {world.dp_size}x{world.tp} {tokens} {'on' if liger else 'off'}"
        try:
            row = measure(
                name, tokens, options, world, liger=liger, checkpointing=checkpointing,
                peak_flops=peak_flops,
            )  # fmt: skip
        except torch.cuda.OutOfMemoryError as error:
            if world.world_size > 1:
                raise  # the other ranks are waiting in a collective
            say(f"{head} {checkpointing} | out of memory: {str(error)[:80]}")
            continue
        step_s = row["step_s"]
        step = f"{step_s * 1e3:.1f} ms" if isinstance(step_s, float) else "out of memory"
        say(
            f"{head} {checkpointing} | {row['forward_s'] * 1e3:.1f} ms "
            f"{row['forward_backward_s'] * 1e3:.1f} ms {step} | {row['tokens_per_s']:.0f} "
            f"{row['utilisation']:.2f} | {row['peak_pass_gib']:.1f} {row['peak_all_gib']:.1f}"
        )
        if world.rank == 0:
            keep(row, options.out)
    close_world(world)


if __name__ == "__main__":
    main()
