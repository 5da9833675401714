"""A trainer with an engine on a GPU, to be killed: `gpu_trainer_script.py FOLDER`, or two ranks.

With two ranks: FSDP2 shards, one engine two GPUs wide, a push with every tensor's hash compared on
the leader, then rank 1 fails while rank 0 waits in an NCCL collective.
"""

from __future__ import annotations

import os
import sys

import small
import torch
import torch.distributed as dist
from processes import say
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from selfplay import sync
from selfplay.engines.base import Request
from selfplay.engines.sglang import SGLangEngine


def alone(folder: str) -> None:
    engine = SGLangEngine(folder, **small.ENGINE)
    model = small.build(torch.device("cuda"))
    sync.push(model, engine, version=1)
    engine.generate([Request(small.PROMPTS[0], 8, 0)], small.PLAIN)
    say("training")
    while True:
        torch.randn(1024, 1024, device="cuda") @ torch.randn(1024, 1024, device="cuda")


def two(folder: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group = dist.new_group(backend="gloo")
    engine = SGLangEngine(folder, **small.ENGINE, tp_size=2) if rank == 0 else None
    dist.barrier(group)
    policy, reference = small.build(device), small.build(device)
    mesh = init_device_mesh("cuda", (2,))
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    if engine is not None:
        engine.sleep()
        engine.wake("weights")
    pushed = sync.push(policy, engine, version=1, group=group)
    if engine is not None:
        engine.wake("kv_cache")
        wanted, held = sync.checksum(reference, tp_size=2), engine.fingerprints()
        wrong = [n for w, h in zip(wanted, held, strict=True) for n in w if w[n] != h.get(n)]
        apart = small.differences(reference, engine).abs().mean().item()
        say("wide", wrong=wrong, num_tensors=sum(map(len, wanted)), gap=apart, gib=pushed.num_bytes)
    dist.barrier(group)
    if rank == 1:
        say("failing")
        raise RuntimeError("a bug in rank 1")
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    total.item()


if __name__ == "__main__":
    two(sys.argv[1]) if "RANK" in os.environ else alone(sys.argv[1])
