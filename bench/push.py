"""Measures the weight sync: engine start, push, sleep and wake times, memory, log-prob mismatch.

    python -m bench.push --shapes 0.5B,1.5B,7B                       one GPU
    torchrun --nproc-per-node 2 -m bench.push --shapes 7B            FSDP2 shards, engine with tp 2
    python -m bench.push --dry-run                                   a tiny model on CPU, same path

Uses real Qwen2.5 configs with random weights. The order is that of a training step: the engine
sleeps, the trainer uses the memory, the engine wakes its weights, receives the push and wakes its
cache. The trainer recomputes the engine's log-probs while the engine sleeps, as in an update: a 7B
in fp32 and an engine with 0.7 of the GPU's memory leave no room for activations. The rate of a
plain copy on the same device is printed for comparison. A push writes everything twice: it casts
the weights into a bucket, then copies them into place. Sizes are in GiB, times in seconds.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bench.memory import copy_ceiling
from bench.rows import keep
from bench.shapes import SHAPES, qwen2_config
from selfplay.colocation import weight_sync as sync
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.sglang import weights as sglang_push
from selfplay.engines.sglang.engine import SGLangEngine

GIB = 2**30
PROMPTS = torch.randint(10, 500, (8, 96), generator=torch.Generator().manual_seed(1)).tolist()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="0.5B,1.5B,7B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--bucket-gib", type=float, default=sglang_push.BUCKET_BYTES / GIB)
    parser.add_argument("--master", default="float32", help="dtype of the trainer's parameters")
    parser.add_argument("--pushes", type=int, default=5, help="timed pushes per shape")
    parser.add_argument(
        "--soak", type=int, default=200, help="pushes of the memory test, first shape only"
    )
    parser.add_argument("--attention", default="auto", help="the engine's attention backend")
    parser.add_argument("--mem-fraction", type=float, default=0.7)
    parser.add_argument("--out", type=pathlib.Path, help="append one JSON line per shape")
    parser.add_argument("--dry-run", action="store_true", help="run a tiny shape on the CPU")
    options = parser.parse_args()
    if options.dry_run:
        options.shapes, options.soak, options.bucket_gib = "tiny", 20, 1e-4
    return options


class Bench:
    """This rank's device and process group, and its figures of the current shape."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cpu") if options.dry_run else torch.device("cuda", local)
        self.dtype = torch.float32 if options.dry_run else torch.bfloat16
        self.group: dist.ProcessGroup | None = None
        self.facts: dict[str, Any] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("gloo" if options.dry_run else "cpu:gloo,cuda:nccl")
            self.group = dist.new_group(backend="gloo")

    def meet(self) -> None:
        """Wait for all ranks and for all work queued on their devices."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.group is not None:
            dist.barrier(self.group)

    def empty_cache(self) -> None:
        """Free the memory of the buckets, which the engine needs next."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def note(self, name: str, value: Any) -> None:
        self.facts[name] = value
        if self.rank == 0:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"  {name:34s} {shown}", flush=True)

    def note_memory(self, phase: str) -> None:
        """Note the GiB in use on this device by all processes, and by this process's tensors."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            allocated = torch.cuda.memory_allocated()
            gib = [round((total - free) / GIB, 2), round(allocated / GIB, 2)]
            self.note(f"memory {phase}", gib)

    def push(
        self, model: PreTrainedModel, engine: SGLangEngine | None, version: int
    ) -> sync.Pushed:
        return sync.push(
            model,
            engine,
            version=version,
            group=self.group,
            dtype=self.dtype,
            device=self.device,
            bucket_bytes=int(self.options.bucket_gib * GIB),
        )


def start_engine(bench: Bench, folder: str) -> SGLangEngine | None:
    """The replica's engine on rank 0, with its own random weights; None on other ranks."""
    if bench.rank != 0:
        return None
    on_cpu = bench.device.type == "cpu"
    engine = SGLangEngine(
        folder,
        tp_size=bench.size,
        mem_fraction=bench.options.mem_fraction,
        attention_backend="auto" if on_cpu else bench.options.attention,
        dtype=str(bench.dtype).removeprefix("torch."),
        max_running_requests=16 if on_cpu else 512,
        max_total_tokens=8192 if on_cpu else None,
        device=bench.device.type,
        load_format="dummy",
    )
    for part, seconds in engine.start_s.items():
        bench.note(f"engine start, {part} s", seconds)
    bench.note("attention", engine.attention_backend)
    return engine


def build_trainer(bench: Bench, config: Qwen2Config) -> PreTrainedModel:
    """A model with random weights, equal on all ranks; sharded if there are several ranks."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, bench.options.master)
        ).eval()
    if bench.size > 1:
        mesh = init_device_mesh(bench.device.type, (bench.size,))
        policy = MixedPrecisionPolicy(param_dtype=bench.dtype, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def sample_turns(bench: Bench, engine: SGLangEngine | None) -> list[Completion]:
    """A few turns sampled by the engine, sent to all ranks."""
    shared: list[list[Completion] | None] = [None]
    if engine is not None:
        shared[0] = engine.generate([Request(p, 64, 0) for p in PROMPTS], Sampling(1.0, ()))
    if bench.group is not None:
        dist.broadcast_object_list(shared, group=bench.group, group_src=0)
    return shared[0] or []


@torch.no_grad()
def mismatch(bench: Bench, model: PreTrainedModel, completions: list[Completion]) -> list[float]:
    """The mean and largest |log-prob difference| of engine and trainer, in nats per token."""
    engine_logprobs: list[float] = []
    trainer_logprobs: list[float] = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]], device=bench.device)
        with torch.autocast(bench.device.type, bench.dtype, enabled=bench.dtype != torch.float32):
            logits = model(ids, logits_to_keep=len(completion.ids) + 1).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        trainer_logprobs += chosen.tolist()
        engine_logprobs += completion.logprobs
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass, the gathered copies stay in memory
    differences = [abs(e - t) for e, t in zip(engine_logprobs, trainer_logprobs, strict=True)]
    return [round(statistics.mean(differences), 5), round(max(differences), 4)]


@torch.no_grad()
def scale_weights(model: PreTrainedModel, factor: float) -> None:
    for parameter in model.parameters():
        parameter.mul_(factor)


def time_pushes(bench: Bench, model: PreTrainedModel, engine: SGLangEngine | None) -> None:
    """Note the first, median and best seconds of a push, and its rate."""
    seconds = []
    for version in range(1, bench.options.pushes + 1):
        bench.meet()
        began_s = time.perf_counter()
        pushed = bench.push(model, engine, version)
        bench.meet()
        seconds.append(time.perf_counter() - began_s)
    bench.note("push GiB", pushed.num_bytes / GIB)
    bench.note(
        "push s: first, median, best", [seconds[0], statistics.median(seconds), min(seconds)]
    )
    bench.note("push s: gather, engine (last)", [pushed.gather_s, pushed.engine_s])
    bench.note("push GiB/s (median)", pushed.num_bytes / GIB / statistics.median(seconds))
    bench.note("copy GiB/s (ceiling)", copy_ceiling(bench.device))


def hand_over(bench: Bench, model: PreTrainedModel, engine: SGLangEngine | None) -> None:
    """The steps after an update: wake the weights, push and compare, wake the cache."""
    bench.empty_cache()
    if engine is not None:
        engine.wake("weights")
    bench.push(model, engine, bench.options.pushes + 1)
    if bench.device.type == "cuda":
        names = [name for name, _ in sync.named_weights(model)]
        compared = sync.compare(
            model, engine, names, group=bench.group, dtype=bench.dtype, device=bench.device
        )
        bench.note(
            "elements compared, of them wrong", [compared.num_elements, compared.num_different]
        )
    bench.empty_cache()
    if engine is not None:
        engine.wake("kv_cache")
    bench.meet()


def check(bench: Bench, model: PreTrainedModel, engine: SGLangEngine | None) -> None:
    """Note the mismatch with equal weights, with stale ones, and with equal ones after a push."""
    for name, factor in (("equal weights", 1.0), ("stale weights", 1.03), ("a push", 1.0)):
        completions = sample_turns(bench, engine)
        if engine is not None:
            engine.sleep()
        bench.meet()
        scale_weights(model, factor)
        bench.note(f"mismatch with {name}", mismatch(bench, model, completions))
        hand_over(bench, model, engine)


def soak(bench: Bench, model: PreTrainedModel, engine: SGLangEngine | None) -> None:
    """Push many times and note the memory, which must not grow."""
    used = []
    for i in range(bench.options.soak):
        bench.push(model, engine, 1000 + i)
        if bench.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            used.append((total - free) / GIB)
    if used:
        tenth = max(1, len(used) // 10)
        bench.note("soak GiB: after a tenth, at the end", [used[tenth - 1], used[-1]])
    bench.note("soak pushes", bench.options.soak)


def measure(bench: Bench, shape: str, *, with_soak: bool) -> None:
    bench.facts = {"shape": shape, "ranks": bench.size, "master": bench.options.master}
    if bench.rank == 0:
        print(f"{shape}, {bench.size} rank(s)", flush=True)
    config = qwen2_config(shape)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        bench.note_memory("before the engine")
        engine = start_engine(bench, folder)
        bench.meet()
    try:
        bench.note_memory("engine awake")
        for verb in ("sleep", "wake weights", "wake kv_cache"):
            began_s = time.perf_counter()
            if engine is not None:
                engine.sleep() if verb == "sleep" else engine.wake(verb.removeprefix("wake "))
                bench.note(f"{verb} s", time.perf_counter() - began_s)
        if engine is not None:
            engine.sleep()
        bench.meet()
        bench.note_memory("engine asleep")
        model = build_trainer(bench, config)
        bench.note_memory("trainer in place")
        if engine is not None:
            engine.wake("weights")
        time_pushes(bench, model, engine)
        bench.empty_cache()
        bench.note_memory("pushed, cache asleep")
        if engine is not None:
            engine.wake("kv_cache")
        bench.meet()
        bench.note_memory("all awake")
        check(bench, model, engine)
        if with_soak:
            soak(bench, model, engine)
        del model
    finally:
        if engine is not None:
            engine.close()
    bench.meet()
    bench.empty_cache()
    bench.note_memory("engine closed")


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast on shared hosts
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    options = arguments()
    bench = Bench(options)
    for index, shape in enumerate(options.shapes.split(",")):
        measure(bench, shape, with_soak=index == 0 and options.soak > 0)
        if bench.rank == 0:
            keep(bench.facts, options.out)
    if bench.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
