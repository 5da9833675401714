"""Run under torchrun by test_lora.py: adapters on two ranks against the same adapters in one.

Usage: torchrun --nproc-per-node 2 tests/lora_worker.py FOLDER. Rank 0 writes FOLDER/report.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from critic_worker import ALONE
from test_lora import SMALL
from test_update import config_of, some_samples
from tiny_run import tiny_model, trainer_logprobs

from selfplay import sync
from selfplay.checkpoint import resume, save_checkpoint
from selfplay.engines.hf import HFEngine
from selfplay.learner import Learner
from selfplay.lora import Adapters, full_weights, is_adapter
from selfplay.model import export, load_model, load_sharded
from selfplay.objective import Part
from selfplay.parallel import World, barrier, close_world, init_world
from selfplay.update import update


def make(base: Path, world: World) -> Learner:
    model = load_sharded(
        str(base), world, dtype=torch.float32, param_dtype=torch.float32, lora=SMALL, seed=3
    )
    # SGD shows the gradients themselves.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return Learner(model, optimizer, world, torch.float32, adapters=Adapters(SMALL, base))


def steps(learner: Learner, num: int) -> None:
    """Steps on all samples, dealt unevenly to two ranks."""
    samples = some_samples(tiny_model())
    world = learner.world
    if world.world_size == 2:
        samples = [samples[i] for i in ((0, 2, 3, 5, 7) if world.rank == 0 else (1, 4, 6))]
    for _ in range(num):
        update(learner, [Part(samples, "surrogate")], lr=1.0, config=config_of())


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_weights(learner.model)}


def main() -> None:
    folder = Path(sys.argv[1])
    base = folder / "base"
    world = init_world(1, device="cpu")
    if world.rank == 0:
        export(tiny_model(), None, base)
    barrier(world)
    lone, shared = make(base, ALONE), make(base, world)
    for learner in (lone, shared):
        steps(learner, 3)
    wanted, found, start = weights(lone), weights(shared), dict(tiny_model().named_parameters())
    engine = HFEngine(tiny_model(seed=9))
    sync.push(shared.model, engine, version=1, dtype=torch.float32)
    export(shared.model, None, folder / "merged", world=world)
    save_checkpoint(folder, shared, None, step=3, keep=1, carried={})
    again = make(base, world)
    resume(folder, again)
    for learner in (shared, again):
        steps(learner, 1)
    one, other = weights(shared), weights(again)
    exported = load_model(str(folder / "merged"), device="cpu", dtype=torch.float32)
    said = [
        trainer_logprobs(model.eval(), some_samples(tiny_model()), temperature=1.0)
        for model in (lone.model, engine.model, exported)
    ]
    report = {
        "weights": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
        "moved": max(float((wanted[n] - start[n]).detach().abs().max()) for n in wanted),
        "logprobs": max(float((other - said[0]).abs().max()) for other in said[1:]),
        "resumed": float(all(torch.equal(one[name], other[name]) for name in one)),
        "frozen": float(
            all(
                p.grad is None and p.requires_grad is is_adapter(n)
                for n, p in shared.model.named_parameters()
            )
        ),
    }
    if world.rank == 0:
        (folder / "report.json").write_text(json.dumps(report, indent=1))
    close_world(world)


if __name__ == "__main__":
    main()
