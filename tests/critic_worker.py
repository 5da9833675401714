"""Run under torchrun by test_ppo.py: PPO's critic on two ranks against the same critic in one.

Usage: torchrun --nproc-per-node 2 tests/critic_worker.py FOLDER. Rank 0 writes FOLDER/report.json:
for each kind of critic the largest differences, and whether a checkpoint came back bit for bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from test_ppo import PPO, rewarded
from test_update import config_of, some_samples
from tiny_run import CPU, tiny_model
from transformers import PreTrainedModel

from selfplay.checkpoint import resume, save_checkpoint
from selfplay.config import CriticConfig, OptimConfig
from selfplay.critic import make_critic
from selfplay.learner import Learner
from selfplay.objective import Part
from selfplay.optim import make_optimizer
from selfplay.parallel import World, close_world, full_tensors, gather_objects, init_world, shard
from selfplay.parallel.replica import make_replica
from selfplay.ppo import judge, with_values
from selfplay.samples import Sample
from selfplay.update import update

ALONE = World(0, 1, 0, CPU, None, 0, 1, 0, 1, None, make_replica(0, 1, 1))


def make(kind: str, world: World, *, plain: bool) -> Learner:
    """Policy and critic on this world; `plain` gradient descent shows the gradients themselves."""

    def placed(seed: int) -> PreTrainedModel:
        return shard(tiny_model(seed=seed), world)

    model = placed(0)
    critic = make_critic(
        placed(3) if kind == "model" else None,
        width=32,
        config=CriticConfig(kind=kind),
        optim=OptimConfig(),
        world=world,
    )
    optimizer = make_optimizer(model, OptimConfig())
    if plain:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        critic.optimizer = torch.optim.SGD(critic.module.parameters(), lr=0.3)
    return Learner(model, optimizer, world, torch.float32, critic=critic)


def steps(
    learner: Learner, samples: Sequence[Sample]
) -> tuple[list[list[float]], dict[str, float]]:
    """Three steps, the first of which gives the head something to hand down to its trunk."""
    config = config_of(*PPO, "optim.tokens_per_microbatch=64", "critic.warmup_steps=2")
    metrics: dict[str, float] = {}
    judged = list(samples)
    for step in range(3):
        judged, found = judge(learner, samples, config=config)
        parts = with_values([Part(judged, "surrogate")], judged, step=step, config=config)
        metrics = found | update(learner, parts, lr=0.1, config=config)
    return [s.advantages for s in judged], metrics


def tensors(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner.critic is not None
    modules = {"policy": learner.model, "critic": learner.critic.module}
    return {
        f"{kind}.{name}": tensor.clone()
        for kind, module in modules.items()
        for name, tensor in full_tensors(module)
    }


def compare(kind: str, world: World, folder: Path) -> dict[str, float]:
    """Rank 1 has fewer tokens and micro-batches than rank 0."""
    samples = rewarded(some_samples(tiny_model()))
    mine = [samples[i] for i in ((0, 2, 3, 5, 7) if world.rank == 0 else (1, 4, 6))]
    lone = make(kind, ALONE, plain=True)
    advantages, expected = steps(lone, samples)
    shared = make(kind, world, plain=True)
    own, found = steps(shared, mine)
    parts = gather_objects({s.name: a for s, a in zip(mine, own, strict=True)}, world)
    by_name = {name: a for part in parts for name, a in part.items()}
    wanted = tensors(lone)
    return {
        "weights": max(float((t - wanted[n]).abs().max()) for n, t in tensors(shared).items()),
        "moved": float((wanted["critic.head.weight"]).abs().max()),
        "advantages": max(
            abs(x - y)
            for s, a in zip(samples, advantages, strict=True)
            for x, y in zip(a, by_name[s.name], strict=True)
        ),
        "metrics": max(abs(found[name] - expected[name]) for name in expected),
        "resumed": came_back(kind, world, mine, folder / kind),
    }


def came_back(kind: str, world: World, samples: Sequence[Sample], folder: Path) -> float:
    """AdamW, a checkpoint, two more steps; and the two steps again from the checkpoint."""
    learner = make(kind, world, plain=False)
    steps(learner, samples)
    save_checkpoint(folder, learner, None, step=1, keep=1, carried={})
    steps(learner, samples)
    again = make(kind, world, plain=False)
    assert resume(folder, again) == (1, {})
    steps(again, samples)
    one, other = tensors(learner), tensors(again)
    return float(all(torch.equal(one[name], other[name]) for name in one))


def main() -> None:
    folder = Path(sys.argv[1])
    world = init_world(1, device="cpu")
    report = {kind: compare(kind, world, folder) for kind in ("head", "shared_head", "model")}
    if world.rank == 0:
        (folder / "report.json").write_text(json.dumps(report, indent=1))
    close_world(world)


if __name__ == "__main__":
    main()
