"""Run by `ranks.py`, by two_ranks.py too: a model on a mesh against the same model whole, for each
case the largest differences from one process, in fp32."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from selfplay.advantages.sample import Sample
from selfplay.checkpoint import export_atomically
from selfplay.config import OptimConfig, ScratchConfig, load_config
from selfplay.distributed import (
    World,
    clip_grad_norm,
    close_world,
    gather_flat,
    gather_objects,
    init_world,
    local_part,
    shard,
)
from selfplay.engines.weights import Weights
from selfplay.learner.batch import balance_tokens, micro_batches
from selfplay.learner.learner import Learner
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.update import optimizer_step, surrogate_term
from selfplay.model.attention import PackedRow, register_packed_attention
from selfplay.model.policy import load_sharded, policy_logprobs, scratch_model

# 54 words over 2 x 2 ranks leave 27 rows to a pair: FSDP has to cope with 14 and 13.
VOCAB = 54
LENGTHS = (5, 9, 3)
PREDICT = (1, 2, 3, 5, 6, 9, 12, 14)
AGGREGATIONS = {
    "token_mean": ["algorithm.entropy=0.1"],
    "sequence_mean": ["algorithm.loss=gspo", "algorithm.aggregation=sequence_mean"],
    "constant": ["algorithm.aggregation=9"],
}


def build(arch: str, tied: bool) -> PreTrainedModel:
    """The same small model in every process. Qwen3 has a norm over each head, and here biases: that
    of a rowwise layer (o_proj) is whole on every tensor-parallel rank."""
    if arch != "qwen3":
        shape = ScratchConfig(
            arch=arch, width=32, layers=2, heads=4, kv_heads=2, mlp_width=64,
            max_positions=64, vocab_size=VOCAB,
        )  # fmt: skip
        return scratch_model(shape, seed=1, tie_word_embeddings=tied)
    register_packed_attention()
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=tied, initializer_range=0.08, attention_bias=True,
    )  # fmt: skip
    config._attn_implementation = "packed"
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # All ones or zeros would hide a weight that is used in the wrong place.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def score(model: PreTrainedModel, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies of one packed batch of three sequences."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
    predict = torch.tensor(PREDICT)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    ids, positions, bounds, predict = (t.to(device) for t in (ids, positions, bounds, predict))
    row = PackedRow(ids, positions, bounds, max(LENGTHS), predict)
    return policy_logprobs(model, row, ids[predict + 1], temperature=0.8)


def backward(model: PreTrainedModel, seeds: list[int], total: int, device: torch.device) -> None:
    for seed in seeds:
        logprobs, _ = score(model, seed, device)
        (logprobs.sum() / total).backward()


def full(tensor: torch.Tensor) -> torch.Tensor:
    full_tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full_tensor.detach().cpu()


def gathers_exactly(model: PreTrainedModel) -> bool:
    """One gather of all parameters against `full_tensor()` of each, as they are and in bf16."""
    parameters = list(model.parameters())
    same = []
    for dtype in (torch.float32, torch.bfloat16):
        flat = gather_flat(parameters, dtype=dtype, device=parameters[0].device)
        parts = flat.split([p.numel() for p in parameters])
        same += [
            torch.equal(part.view(p.shape).cpu(), full(p).to(dtype))
            for part, p in zip(parts, parameters, strict=True)
        ]
    return all(same)


def watch_norms(model: PreTrainedModel) -> list[type]:
    """A list to which every norm adds the type of what it reads, forward and backward."""
    seen: list[type] = []

    def look(_norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        seen.append(type(args[0]))
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))

    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(look)
    return seen


def compare(arch: str, tied: bool, recompute: int, world: World) -> dict[str, float]:
    """Two micro-batches a rank on the mesh; the same in one process, one after the other."""
    seeds = [list(range(10 * r, 10 * r + 2)) for r in range(world.dp_size)]
    total = 2 * world.dp_size * len(PREDICT)
    lone = build(arch, tied)
    backward(lone, [s for row in seeds for s in row], total, torch.device("cpu"))
    reference = dict(lone.named_parameters())
    expected = score(lone, 99, torch.device("cpu"))
    model = shard(build(arch, tied), world, recompute=recompute)
    model.train()
    with torch.no_grad():
        seen = score(model, 99, world.device)
    read_by_norms = watch_norms(model)
    backward(model, seeds[world.dp_rank], total, world.device)
    squares = sum(p.grad.double().square().sum().item() for p in reference.values())
    norm = clip_grad_norm(model, squares**0.5 / 2, world)
    gaps = {
        name: (full(p.grad) * 2 - reference[name].grad).abs().max()
        / reference[name].grad.abs().max()
        for name, p in model.named_parameters()
    }  # fmt: skip
    same = [torch.equal(full(p), reference[name]) for name, p in model.named_parameters()]
    return {
        "gathered": float(gathers_exactly(model)),
        "plain": float(bool(read_by_norms) and set(read_by_norms) == {torch.Tensor}),
        "logprob": (seen[0].cpu() - expected[0]).abs().max().item(),
        "entropy": (seen[1].cpu() - expected[1]).abs().max().item(),
        "gradient": max(gap.item() for gap in gaps.values()),
        "norm": abs(norm / squares**0.5 - 1),
        "values_kept": float(all(same)),
        "names_kept": float(set(gaps) == set(reference)),
    }


def save_and_compare(model: PreTrainedModel, folder: Path, world: World) -> None:
    """Save the policy as a run does, and gather its weights as a comparison with the engine does;
    with gloo, without the collectives that have crashed in it."""
    with ExitStack() as patches:
        crash_in_gloo = []
        if world.device.type == "cpu":
            crash_in_gloo = [
                patches.enter_context(patch.object(DTensor, "full_tensor")),
                patches.enter_context(patch("torch.distributed.all_gather_object")),
            ]
        export_atomically(model, None, folder, world=world)
        for name, tensor in Weights(model, torch.bfloat16).named():
            assert tensor.dtype == torch.bfloat16, name
        held: list[object] = [world.rank, "x" * 1000 * world.rank, {"none": None}]
        every = gather_objects(held, world)
        assert [row[0] for row in every] == list(range(world.world_size))
        assert every[world.rank] == held
        assert (every[world.rank] is held) == (world.control is None)  # a single rank's is its own
        for collective in crash_in_gloo:
            collective.assert_not_called()


def round_trip(world: World, folder: Path) -> dict[str, float]:
    """Export from shards, read back whole and in shards, both bit for bit."""
    lone = build("qwen2", True)
    out = folder / "export"
    save_and_compare(shard(build("qwen2", True), world), out, world)
    back = AutoModelForCausalLM.from_pretrained(out)
    exported = [torch.equal(p, back.get_parameter(n)) for n, p in lone.named_parameters()]
    again = load_sharded(str(out), world, master_dtype=torch.float32, compute_dtype=torch.float32)
    loaded = [torch.equal(full(p), lone.get_parameter(n)) for n, p in again.named_parameters()]
    with torch.no_grad():
        seen = score(again, 5, world.device)[0].cpu()
    gap = (seen - score(lone, 5, torch.device("cpu"))[0]).abs()
    mine = sum(p.to_local().numel() for p in again.parameters())
    return {
        "exported": float(all(exported) and type(back) is type(lone)),
        "loaded": float(all(loaded) and len(loaded) == len(exported)),
        "logprob": gap.max().item(),
        "share": mine / sum(p.numel() for p in lone.parameters()),
    }


def play(num: int) -> list[Sample]:
    """Samples of 6, 9, 12 and more tokens, some of which are not trained; all begin alike."""
    generator = torch.Generator().manual_seed(7)
    beginning = torch.randint(0, VOCAB, (5,), generator=generator).tolist()
    samples = []
    for index in range(num):
        length = 6 + 3 * index
        rest = torch.randint(0, VOCAB, (length - 5,), generator=generator).tolist()
        ids = beginning + rest
        noise = torch.randn(2 * length, generator=generator).tolist()
        mask = [0, 0, *(int(x > -0.5) for x in noise[2 : length - 1]), 1]
        old = [-4.0 + 0.3 * x for x in noise[length:]]
        advantage = noise[0] + 1.0
        samples.append(Sample(f"{index}", ids, mask, old, [advantage * m for m in mask]))
    return samples


def aggregate(overrides: list[str], world: World) -> dict[str, float]:
    """One step of plain descent on seven samples, dealt unevenly, against one process's step, which
    computes their common beginning again for each."""
    free = ["model.scratch={}", "rollout.max_game_tokens=1000", "optim.max_grad_norm=1e6"]
    config = load_config(None, [*free, "optim.tokens_per_microbatch=24", *overrides])
    samples = play(7)
    alone = replace(world, rank=0, world_size=1, device=torch.device("cpu"), mesh=None,
                    dp_rank=0, dp_size=1, tp=1, control=None)  # fmt: skip
    mine = samples[world.dp_rank :: world.dp_size]
    plain = replace(config, optim=replace(config.optim, share_prefixes=False))
    rows = [batch for _, batch in micro_batches(mine, alone, budget=24)]
    moved = []
    for place, own, used in ((alone, samples, plain), (world, mine, config)):
        model = shard(build("qwen2", True), place)
        learner = Learner(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            world=place,
            compute_dtype=torch.float32,
        )
        optimizer_step(learner, [surrogate_term(own, used)], lr=1.0, config=used)
        start = dict(build("qwen2", True).named_parameters())
        moved.append({n: full(p) - start[n].detach() for n, p in model.named_parameters()})
    lone, meshed = moved
    gaps = [(meshed[n] - lone[n]).abs().max() / lone[n].abs().max() for n in lone]
    shared_rows = sum(batch.row.prefixes is not None for batch in rows)
    return {"gradient": max(gap.item() for gap in gaps), "shared_rows": float(shared_rows)}


def rounded_step(world: World) -> dict[str, float]:
    """One step on bf16 weights: ranks that hold the same norms and biases must round them alike."""
    model = shard(build("qwen3", True).bfloat16(), world)  # computing in fp32
    before = [full(p).clone() for p in model.parameters()]
    backward(model, [world.dp_rank], 2 * len(PREDICT), world.device)
    clip_grad_norm(model, 1.0, world)
    make_optimizer(model, OptimConfig(lr=3e-3, master_dtype="bfloat16")).step()
    moved = [not torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True)]
    repeated = ("norm.weight", "o_proj.bias")
    parts = [local_part(p.detach()) for n, p in model.named_parameters() if n.endswith(repeated)]
    held = torch.cat([part.float().cpu() for part in parts]).tolist()
    rows = gather_objects(held, world)
    alike = [rows[rank] == rows[rank - rank % world.tp] for rank in range(world.world_size)]
    return {"alike": float(all(alike)), "moved": float(all(moved))}


def shared(world: World) -> list[tuple[str, bool]]:
    """Whose samples each rank trains on after sharing, and whether they arrived as they were."""

    def sample_of(name: str, length: int) -> Sample:
        ids = [ord(name) * 10 + place for place in range(length)]
        mask = [0] + [1] * (length - 1)
        logprobs = [-token / 7 for token in ids]
        return Sample(name, ids, mask, logprobs, [0.0] * length, [0.25] * length, group=name)

    played = [("a", 5), ("b", 3)], [], [("c", 4), ("d", 4)], [("e", 1)], *[[]] * 4
    mine = balance_tokens([sample_of(*one) for one in played[world.rank]], world)
    unchanged = all(sample == sample_of(sample.name, len(sample.ids)) for sample in mine)
    return gather_objects(("".join(sample.name for sample in mine), unchanged), world)


# The cases that the fast tests read; the slow ones read all.
FAST = (
    "tp", "shared", "qwen3 True", "one unit", "round trip", "token_mean",
    "rounded",
)  # fmt: skip


def measured(
    world: World, folder: Path, wanted: Callable[[str], bool] = lambda case: True
) -> dict[str, object]:
    """For each wanted case the largest differences from one process. Each layer is an FSDP unit, as
    in a large model, except in the case "one unit"."""
    cases: dict[str, Callable[[], object]] = {
        "shared": partial(shared, world),
        "one unit": partial(compare, "qwen2", True, False, world),
        "llama False": partial(compare, "llama", False, False, world),
        "qwen3 True": partial(compare, "qwen3", True, True, world),
        "round trip": partial(round_trip, world, folder),
        **{name: partial(aggregate, words, world) for name, words in AGGREGATIONS.items()},
        "rounded": partial(rounded_step, world),
    }
    report: dict[str, object] = {"tp": world.tp}
    for name, case in cases.items():
        if wanted(name):
            layers = name != "one unit"
            with patch.object(sys.modules[shard.__module__], "ONE_UNIT", 0 if layers else 2**30):
                report[name] = case()
    return report


def on_mesh(tp: str, device: str, *cases: str, folder: Path) -> dict[str, object]:
    """These cases, or all, on a mesh of these ranks, of which `tp` divide each layer."""
    world = init_world(int(tp), device=device)
    report = measured(world, folder, lambda case: not cases or case in cases)
    close_world(world)
    return report
