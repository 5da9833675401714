"""Run by test_ranks.py: `ranks_script.py MODEL_FOLDER OUT`, two ranks on gloo.

The model has FSDP2 shards. The ranks share an engine that rank 0 leads; then rank 1 fails while
rank 0 waits in a barrier. test_train.py has ranks with an engine each.
"""

from __future__ import annotations

import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from selfplay.distributed import init_world
from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.weights import Weights
from tests.helpers.processes import say
from tests.sglang import tiny

PROMPT, PLAIN = list(range(10, 50)), Sampling(1.0, (tiny.STOP,))


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mismatches(engine: SGLangEngine, model: PreTrainedModel) -> list[float]:
    completions = engine.generate_batch([Request(PROMPT[:n], 10, 0) for n in (5, 40)], PLAIN)
    return [
        tiny.worst_mismatch(model, PROMPT[:n], c) for n, c in zip((5, 40), completions, strict=True)
    ]


def main(folder: str, out: str) -> None:
    world = init_world(engine_tp=2, device="cpu")
    rank, group = world.rank, world.replica.group
    # torchrun sets this, and it keeps an engine's children from starting unless it is removed.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    reference = tiny.moved(tiny.build(), seed=4)
    policy = sharded(tiny.moved(tiny.build(), seed=4))

    wide = tiny.start(folder, tp_size=2, group=group) if rank == 0 else None
    stale = mismatches(wide, reference) if wide is not None else []
    part = tiny.kind().part(world, torch.float32, room=0.0)
    engine = part if wide is None else wide

    def weights() -> Weights:
        return Weights(policy, torch.float32, bucket_bytes=50_000)

    before = engine.compare(weights())
    for version in (1, 2):
        engine.load(weights(), version)
    after = engine.compare(weights())
    say(f"compared {rank}", before=before.num_different, after=after.num_different)
    say(f"counted {rank}", num=after.num_elements)
    if wide is not None:
        say("wide", stale=stale, fresh=mismatches(wide, reference), version=wide.version)
        wide._loop.engines[0].save_sharded_model(path=out, pattern=None, max_size=None)
        torch.save(dict(reference.named_parameters()), pathlib.Path(out) / "reference.pt")

    extra = torch.nn.Module()
    extra.inner, extra.more = policy, torch.nn.Linear(2, 2)
    try:
        engine.load(Weights(extra, torch.float32), 3)
    except ValueError as error:
        say(f"refused {rank}", error=str(error))
    dist.barrier()
    if rank == 1:
        say("failing")
        raise RuntimeError("a bug in rank 1")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
