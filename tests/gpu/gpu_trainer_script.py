"""A trainer with an engine on a GPU, to be killed: `gpu_trainer_script.py FOLDER`, or some ranks:
`torchrun … gpu_trainer_script.py FOLDER TP END`.

With ranks: shards on a mesh, engines two GPUs wide, pushes with every tensor's hash compared on the
leaders, then rank 1 fails (END "raise") or is killed ("kill") while the others wait in an NCCL
collective.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from selfplay.distributed import barrier, init_world, shard
from selfplay.engines.base import Engine, Request
from selfplay.engines.sglang.fast.engine import FastPart
from selfplay.engines.weights import Weights
from tests.gpu import small
from tests.helpers.engine_layout import expected_hashes, held_hashes
from tests.helpers.processes import say

NUM_PUSHES = 100


def alone(folder: str) -> None:
    engine = small.start(folder)
    model = small.build(torch.device("cuda"))
    engine.load(Weights(model, engine.dtype), 1)
    engine.generate_batch([Request(small.PROMPTS[0], 8, 0)], small.PLAIN)
    say("training")
    while True:
        torch.randn(1024, 1024, device="cuda") @ torch.randn(1024, 1024, device="cuda")


def ranks(folder: str, tp: int, end: str) -> None:
    world = init_world(tp, engine_tp=2, device="cuda")
    group, engine = world.replica.group, None
    part: Engine = FastPart(world, torch.bfloat16, mem_fraction=0.0)
    if world.replica.leads:
        part = engine = small.start(folder, tp_size=2, base_gpu_id=world.local_rank, group=group)
    barrier(world)
    policy, reference = shard(small.build(world.device), world), small.build(world.device)
    if engine is not None:
        engine.sleep()
        engine.wake("weights")
    for version in range(1, NUM_PUSHES + 1):
        part.load(Weights(policy, part.dtype), version)
        if version == NUM_PUSHES // 10:
            before = small.used_bytes()
    grown = small.used_bytes() - before
    if engine is not None:
        engine.wake("kv_cache")
        wanted, held = expected_hashes(reference, tp_size=2), held_hashes(engine)
        wrong = [n for w, h in zip(wanted, held, strict=True) for n in w if w[n] != h.get(n)]
        apart_T = small.differences(reference, engine)
        say(
            f"wide {world.rank}",
            wrong=wrong,
            num_tensors=sum(map(len, wanted)),
            gap=apart_T.abs().mean().item(),
            kl=(apart_T.exp() - apart_T - 1).mean().item(),
            grown=grown,
        )
    barrier(world)
    if world.rank == 1:
        say("failing")
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a bug in rank 1")
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total)
    total.item()


if __name__ == "__main__":
    if "RANK" in os.environ:
        ranks(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        alone(sys.argv[1])
