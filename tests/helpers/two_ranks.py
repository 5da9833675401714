"""Run by `ranks.py` for `processes.two_ranks`: the claims on two ranks, measured by one pair of
them."""

import errno
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from dialop.shown import error_line
from selfplay.advantages.advantages import compute_advantages, reward_samples
from selfplay.advantages.sample import Sample
from selfplay.atomic import damage
from selfplay.checkpoint import begin_checkpoint, resume
from selfplay.config import (
    AlgorithmConfig,
    LoraConfig,
    OptimConfig,
    RewardConfig,
)
from selfplay.distributed import (
    World,
    barrier,
    close_world,
    gather_objects,
    init_world,
    shard,
)
from selfplay.distributed.world import make_replica
from selfplay.engines.hf import HFEngine
from selfplay.engines.weights import Weights
from selfplay.learner.batch import balance_tokens
from selfplay.learner.learner import Learner
from selfplay.learner.method import Parts, make_methods
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.update import optimizer_step, surrogate_term
from selfplay.model.lora import (
    Adapters,
    full_weights,
    is_adapter,
    own_parameters,
    use_adapters,
)
from selfplay.model.policy import export, load_model, load_sharded
from tests.helpers import mesh_worker, resampling
from tests.helpers.small_updates import CRITIC, config_of, ppo_of, rewarded, some_samples
from tests.helpers.tiny_run import CPU, tiny_model, trainer_logprobs

LR = 1e-3
SMALL = LoraConfig(rank=4, alpha=8)
KINDS = ("weights", "muon", "bf16", "critic", "reference", "adapters")  # of a saved state
ALONE = World(0, 1, 0, CPU, None, 0, 1, 1, None, make_replica(0, 1, 1))


def dealt(samples: Sequence[Sample], world: World) -> list[Sample]:
    """Eight samples over the ranks: rank 1 has fewer tokens and micro-batches than rank 0."""
    if world.world_size == 1:
        return list(samples)
    return [samples[i] for i in ((0, 2, 3, 5, 7) if world.rank == 0 else (1, 4, 6))]


# --- the critic ---------------------------------------------------------------------------------


def make_with_critic(world: World, *, plain: bool) -> Learner:
    """Policy and critic on this world; `plain` gradient descent shows the gradients themselves."""

    def placed(seed: int) -> PreTrainedModel:
        return shard(tiny_model(seed=seed), world)

    model = placed(0)
    optimizer = make_optimizer(model, OptimConfig())
    if plain:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    learner = Learner(model, optimizer, world, torch.float32)
    ppo_of(learner, placed(3), "methods.ppo.warmup_steps=2", plain=0.3 if plain else None)
    return learner


def critic_steps(
    learner: Learner, samples: Sequence[Sample]
) -> tuple[list[list[float]], dict[str, float]]:
    """Three steps, the first of which gives the head something to hand down to its trunk."""
    config = config_of(*CRITIC, "optim.tokens_per_microbatch=64")
    (ppo,) = learner.methods
    metrics: dict[str, float] = {}
    judged: Sequence[Sample] = samples
    for step in range(3):
        judged, found = ppo.prepare(samples, step=step, config=config)
        terms = ppo.terms([surrogate_term(judged, config)], judged, step=step)
        metrics = found | optimizer_step(learner, terms, lr=0.1, config=config)
    return [s.advantages for s in judged], metrics


def held(learner: Learner) -> dict[str, torch.Tensor]:
    """Every full weight and every moment of the optimizers."""
    found = {}
    parts = [("policy", learner.model, learner.optimizer)]
    parts += [(name, each.module, each.optimizer) for name, each in learner.method_modules()]
    for part, module, optimizer in parts:
        for name, parameter in module.named_parameters():
            found[f"{part} {name}"] = mesh_worker.full(parameter).clone()
            for moment in ("exp_avg", "exp_avg_sq", "momentum"):
                if moment in optimizer.state.get(parameter, {}):
                    tensor = optimizer.state[parameter][moment]
                    found[f"{part} {name} {moment}"] = mesh_worker.full(tensor).clone()
    for method in learner.methods:
        found |= {name: mesh_worker.full(each).clone() for name, each in method.kept.items()}
    return found


def critic(world: World) -> dict[str, float]:
    """The largest differences from one process."""
    samples = rewarded(some_samples(tiny_model()))
    mine = dealt(samples, world)
    lone = make_with_critic(ALONE, plain=True)
    advantages, expected = critic_steps(lone, samples)
    shared = make_with_critic(world, plain=True)
    own, found = critic_steps(shared, mine)
    parts = gather_objects({s.name: a for s, a in zip(mine, own, strict=True)}, world)
    by_name = {name: a for part in parts for name, a in part.items()}
    wanted = held(lone)
    return {
        "weights": max(float((t - wanted[n]).abs().max()) for n, t in held(shared).items()),
        "moved": float((wanted["critic head.weight"]).abs().max()),
        "advantages": max(
            abs(x - y)
            for s, a in zip(samples, advantages, strict=True)
            for x, y in zip(a, by_name[s.name], strict=True)
        ),
        "metrics": max(abs(found[name] - expected[name]) for name in expected),
    }


# --- adapters -----------------------------------------------------------------------------------


def make_adapted(base: Path, world: World) -> Learner:
    model = load_sharded(
        str(base),
        world,
        master_dtype=torch.float32,
        compute_dtype=torch.float32,
        adapters={"": SMALL},
        seed=3,
    )
    # SGD shows the gradients themselves.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return Learner(model, optimizer, world, torch.float32, adapters=Adapters(SMALL, base))


def adapter_steps(learner: Learner) -> None:
    samples = dealt(some_samples(tiny_model()), learner.world)
    for _ in range(3):
        optimizer_step(learner, [surrogate_term(samples, config_of())], lr=1.0, config=config_of())


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_weights(learner.model)}


def adapters(world: World, folder: Path) -> dict[str, float]:
    """Three steps, merged weights and their export on shards."""
    base = folder / "base"
    if world.rank == 0:
        export(tiny_model(), None, base)
    barrier(world)
    lone, shared = make_adapted(base, ALONE), make_adapted(base, world)
    for learner in (lone, shared):
        adapter_steps(learner)
    wanted, found, begin = weights(lone), weights(shared), dict(tiny_model().named_parameters())
    engine = HFEngine(tiny_model(seed=9))
    engine.load(Weights(shared.model, engine.dtype), 1)
    export(shared.model, None, folder / "merged", world=world)
    barrier(world)
    exported = load_model(str(folder / "merged"), device="cpu", dtype=torch.float32)
    logprobs = [
        trainer_logprobs(model.eval(), some_samples(tiny_model()), temperature=1.0)
        for model in (lone.model, engine.model, exported)
    ]
    own = [(p, is_adapter(name)) for name, p in shared.model.named_parameters()]
    return {
        "weights": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
        "moved": max(float((wanted[n] - begin[n]).detach().abs().max()) for n in wanted),
        "logprobs": max(float((other - logprobs[0]).abs().max()) for other in logprobs[1:]),
        "frozen": float(all(p.grad is None and p.requires_grad is ours for p, ours in own)),
    }


SETS = {"first": SMALL, "second": LoraConfig(rank=2, alpha=2, targets=("q_proj", "down_proj"))}


def make_sets(base: Path, world: World, *, names: Sequence[str] = tuple(SETS)) -> list[Learner]:
    """A learner for each set of adapters, all on one model."""
    loading = {"master_dtype": torch.float32, "compute_dtype": torch.float32}
    named = {name: SETS[name] for name in names}
    model = load_sharded(str(base), world, **loading, adapters=named, seed=3)
    return [
        Learner(
            model,
            torch.optim.SGD(own_parameters(model, name).values(), lr=1.0),
            world,
            torch.float32,
            reference=model,
            adapters=Adapters(lora, base, name),
        )
        for name, lora in named.items()
    ]


def steps_by_turns(learners: Sequence[Learner]) -> None:
    """Three steps of each, beside a KL to the base."""
    samples, config = some_samples(tiny_model()), config_of("algorithm.kl=0.1")
    for _ in range(3):
        for learner in learners:
            mine = dealt(samples, learner.world)
            optimizer_step(learner, [surrogate_term(mine, config)], lr=1.0, config=config)


def adapter_sets(world: World, folder: Path) -> dict[str, float]:
    """Of each set beside the other on shards: the largest differences from one process and from the
    set alone on shards. Whether nothing else has a gradient, and both resume bit for bit."""
    base = folder / "base"
    if world.rank == 0:
        export(tiny_model(), None, base)
    barrier(world)
    lone, shared = make_sets(base, ALONE), make_sets(base, world)
    by_itself = [learner for name in SETS for learner in make_sets(base, world, names=[name])]
    for learners in (lone, shared, by_itself):
        steps_by_turns(learners)
    begin = dict(tiny_model().named_parameters())
    report = {"alone": 1.0, "resumed": 1.0}
    named = {learner.policy: (learner, None) for learner in shared}
    begin_checkpoint(folder, named, step=1).finish({}, keep=1)
    again = make_sets(base, world)
    for number, name in enumerate(SETS):
        own = [dict(full_weights(each[number].model, name)) for each in (lone, shared, by_itself)]
        wanted, found, apart = own
        report["alone"] *= all(torch.equal(found[n], apart[n]) for n in wanted)
        engine, merged = HFEngine(tiny_model(seed=9)), folder / name
        engine.load(Weights(shared[number].model, engine.dtype, policy=name), 1)
        export(shared[number].model, None, merged, world=world, policy=name)
        barrier(world)
        exported = load_model(str(merged), device="cpu", dtype=torch.float32)
        use_adapters(lone[number].model, name)
        logprobs = [
            trainer_logprobs(model.eval(), some_samples(tiny_model()), temperature=1.0)
            for model in (lone[number].model, engine.model, exported)
        ]
        resume(folder, {name: again[number]})
        loaded = dict(full_weights(again[number].model, name))
        report["resumed"] *= all(torch.equal(loaded[n], found[n]) for n in found)
        gaps = [float((other - logprobs[0]).abs().max()) for other in logprobs[1:]]
        report |= {
            f"{name} weights": max(float((found[n] - wanted[n]).abs().max()) for n in wanted),
            f"{name} moved": max(float((wanted[n] - begin[n]).detach().abs().max()) for n in begin),
            f"{name} logprobs": max(gaps),
        }
    parameters = [(p, is_adapter(name)) for name, p in shared[0].model.named_parameters()]
    report["frozen"] = float(
        all(p.grad is None and p.requires_grad is own for p, own in parameters)
    )
    return report


# --- another mesh ---------------------------------------------------------------------------------


def make_saved(kind: str, world: World, base: Path) -> Learner:
    """A learner of each kind of saved state: all weights beside a reference, bf16 weights, a
    critic with a backbone of its own, a reference that moves, adapters, each under AdamW; all
    weights under Muon."""
    if kind == "critic":
        return make_with_critic(world, plain=False)
    if kind == "adapters":
        learner = make_adapted(base, world)
        learner.optimizer = make_optimizer(learner.model, OptimConfig())
        return learner
    bf16 = kind == "bf16"
    model = tiny_model().bfloat16() if bf16 else tiny_model()
    model = shard(model, world)
    optim = OptimConfig(master_dtype="bfloat16") if bf16 else OptimConfig()
    optimizer = make_optimizer(model, optim, kind="muon" if kind == "muon" else "adamw")
    learner = Learner(model, optimizer, world, torch.float32)
    if kind == "reference":
        config = config_of("algorithm.kl=0.1", "methods.kl_reference.average=0.25")
        learner.methods = make_methods(Parts(config, learner, lambda: model))
    if kind == "weights":
        learner.reference = shard(tiny_model(seed=4), world).requires_grad_(False)
    return learner


def one_step(learner: Learner) -> None:
    samples = some_samples(tiny_model())
    if learner.methods:
        samples = rewarded(samples)
    mine = samples if learner.world.dp_size == 1 else dealt(samples, learner.world)
    holds = learner.reference or any(method.has_reference for method in learner.methods)
    config = config_of("algorithm.kl=0.1") if holds else config_of()
    terms = [surrogate_term(mine, config)]
    for method in learner.methods:
        method.restore({})  # each time the first step, so a reference moves
        mine, _ = method.prepare(mine, step=3, config=config)
        terms = method.terms([surrogate_term(mine, config)], mine, step=3)
    optimizer_step(learner, terms, lr=LR, config=config)


def moved(kind: str, world: World, meshes: Sequence[World], folder: Path) -> dict[str, float]:
    """Checkpoints that go from each mesh to the next. Whether all that was saved came back bit for
    bit, and the largest difference of the next gradient from that on the mesh before, as a share of
    a tensor's largest. The gradient is read off the first moment, m' = 0.9 m + 0.1 g of AdamW and
    0.95 m + 0.05 g of Muon; of Muon also the largest difference of the step in learning rates."""
    base = folder / "base"
    if kind == "adapters":
        if world.rank == 0:
            export(tiny_model(), None, base)
        barrier(world)
    learner = make_saved(kind, meshes[0], base)
    one_step(learner)
    same, gap, step, num = True, 0.0, 0.0, 0
    parts = {"exp_avg": 10, "momentum": 20}
    for place, mesh in enumerate(meshes[1:]):
        if learner.world.world_size > 1 or world.rank == 0:
            with patch("selfplay.checkpoint.PART_BYTES", 1000):  # each rank writes four files
                begin_checkpoint(folder / f"{place}", {"": (learner, None)}, step=1).finish(
                    {}, keep=1
                )
        barrier(world)
        again = make_saved(kind, mesh, base)
        assert resume(folder / f"{place}", {"": again}) == (1, {})
        before, loaded = held(learner), held(again)
        same &= before.keys() == loaded.keys()
        same &= all(torch.equal(before[name], loaded[name]) for name in before)
        one_step(learner)
        one_step(again)
        ours, theirs = held(again), held(learner)
        for name in ours:
            part = parts.get(name.rpartition(" ")[2])
            if part is not None:
                mine, other = (
                    (part * s[name] - (part - 1) * before[name]).float() for s in (ours, theirs)
                )
                gap = max(gap, float((mine - other).abs().max() / other.abs().max()))
                num += 1
            if f"{name} momentum" in ours:
                step = max(step, float((ours[name] - theirs[name]).abs().max()) / LR)
        learner = again
    return {"same": float(same), "gradient": gap, "step": step, "num": float(num)}


# --- a batch that is filled up --------------------------------------------------------------------


def filled_up(world: World) -> list[dict[str, object]]:
    """For each rank the instances it played and, for each method, its samples' advantages."""
    rounds, rollout = resampling.play_rounds(resampling.has_variance, resample=20, world=world)
    report: dict[str, object] = {"asked": rounds}
    for method in resampling.METHODS:
        algorithm = AlgorithmConfig(advantage=method)
        samples, _ = reward_samples(rollout.episodes, algorithm=algorithm, reward=RewardConfig())
        mine = balance_tokens(samples, world)
        config = resampling.config_of(0, f"algorithm.advantage={method}")
        found, baselines = compute_advantages(
            mine, {"seat 0": 0.25}, algorithm=config.algorithm, world=world
        )
        advantages = {sample.name: sample.advantages[-1] for sample in found}
        report[method] = {"advantages": advantages, "baselines": baselines}
    return gather_objects(report, world)


# --- a checkpoint of two ranks --------------------------------------------------------------------


def sealed(world: World, folder: Path) -> dict[str, object]:
    """For each rank the files that it read back in a save. What `damage` says of the checkpoint as
    it is, and with a byte changed in each file. What a rank says if rank 1's disk fails in the next
    save, and what then stands there."""
    learner = make_saved("weights", world, folder / "base")
    read: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and ".partial-" in str(arguments[0]) and arguments[1] == "r":
            read.append(str(arguments[0]).rpartition(".partial-step_000001/")[2])

    with patch("selfplay.checkpoint.PART_BYTES", 1000):  # each rank writes four files
        opened = begin_checkpoint(folder, {"": (learner, None)}, step=1)
        sys.addaudithook(watch)
        whole = opened.finish({}, keep=1)
        report: dict[str, object] = {"read": gather_objects(sorted(read), world)}
        again = begin_checkpoint(folder, {"": (learner, None)}, step=1)
    told = "nothing"
    full = patch("os.fsync", side_effect=OSError(errno.EIO, "broken"))
    with full if world.rank == 1 else nullcontext():
        try:
            again.finish({"step": "two"}, keep=1)
        except OSError as error:
            told = error_line(error)
    report |= {
        "told": gather_objects(told, world),
        "left": sorted(p.name for p in (folder / "checkpoints").iterdir()),
    }
    if world.rank == 0:
        report |= {"whole": damage(whole), "found": {}}
        for file in (path for path in whole.rglob("*") if path.is_file()):
            kept = file.read_bytes()
            file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
            report["found"][str(file.relative_to(whole))] = damage(whole)  # type: ignore[index]
            file.write_bytes(kept)
    barrier(world)
    return report


def talk(world: World) -> list[dict[str, object]]:
    """For each rank what the talk effect of five games is."""
    from tests.evaluation import test_talk_effect as games  # which reads this file

    found = games.measured(games.five_games(), world)
    assert found is not None
    return gather_objects(asdict(found), world)


def measured(part: str, *, folder: Path) -> dict[str, object]:
    """The cases of a part, fast or slow."""
    world = init_world(device="cpu")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    pair = replace(world, mesh=mesh, dp_rank=0, dp_size=1, tp=2)
    fast = part == "fast"

    def wanted(case: str) -> bool:
        return (case in mesh_worker.FAST) is fast

    report: dict[str, object] = {
        "fsdp2": mesh_worker.measured(world, folder / "fsdp2", wanted),
        "tp2": mesh_worker.measured(pair, folder / "tp2", wanted),
    }
    if fast:
        report |= {"adapters": adapters(world, folder / "adapters"), "critic": critic(world)}
        report |= {"filled up": filled_up(world), "sealed": sealed(world, folder / "sealed")}
        report["talk effect"] = talk(world)
        close_world(world)
        world = init_world(device="cpu")
        report["a later world"] = gather_objects(world.rank, world)
    else:
        report["adapter sets"] = adapter_sets(world, folder / "adapter sets")
        there_and_back = [world, ALONE, pair, world]
        for kind in KINDS:
            meshes = [world, ALONE, world] if kind in ("critic", "adapters") else there_and_back
            report[f"moved {kind}"] = moved(kind, world, meshes, folder / f"moved {kind}")
    close_world(world)
    return report
