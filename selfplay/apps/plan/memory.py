"""GPU memory of a run by phase, computed from the model's config and the settings before anything
is loaded, and the settings that would make a run fit.

Sizes are in GiB, for one GPU. Static sizes are exact sums of bytes. Activations are a formula
fitted to measured peaks (docs/gpu.md): per token and layer 6 bytes per unit of the MLP's width, 12
per unit of the model's width (8 and 18 without Liger) and 1.5 KiB. A tenth of them is added for
memory that torch's allocator holds and cannot use (ALLOCATOR): `needed` leaves it out, and a GPU
must have room for it. Tensor parallel divides activations, except 8 bytes per unit of the model's
width: each rank keeps the hidden states between the blocks (the residual sum and its norm, twice
per layer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfplay.config import Config, EngineConfig
from selfplay.config.player_spec import CHECKPOINT, parse_shares
from selfplay.distributed.shard import ONE_UNIT
from selfplay.engines.kinds import engine_kind
from selfplay.engines.sglang.choose import load_of
from selfplay.engines.weights import BUCKET_BYTES
from selfplay.learner.learner import Base
from selfplay.learner.optimizer import MAX_AT_ONCE
from selfplay.model.families import cache_width
from selfplay.model.logprob import KEPT, KEPT_WIDTH, LIVE_LOGITS
from selfplay.model.policy import DTYPES
from selfplay.warm_start.beside import fits_beside

GIB = 2**30
CONTEXT = 1.0  # CUDA context and kernels of the trainer
# Of a sleeping SGLang process, measured: its context, and its graphs of prefills.
ASLEEP, PREFILLS = 1.0, 1.0
_GRAPHS = 6  # bytes per token of the vocabulary and running request, in decode graphs
_LOGITS = 20  # copies in fp32 of the logits of all games in play, which the engines' passes hold
ALLOCATOR = "held by the allocator"
SPARE = 2.0  # for allocator fragmentation and the graphs of NCCL
CORES = 16  # of the host for each engine
ENGINES = ("engine's weights", "engine asleep", "partners")  # parts of an update that add up
MOVABLE = ("moments", "critic")  # parts that `parallel.offload` moves
MOST_SHARE = 0.95  # of the free memory for the engines of all policies
LEAST_GAMES = 8  # least number of full-length transcripts that must fit the engine's cache
_HIDDEN = 8  # bytes per unit of the model's width and layer that each tensor-parallel rank keeps
_LEAST_TOKENS = 2048  # of a micro-batch
_MUON_COPIES = 7  # most bf16 copies of the matrices of one shape in an iteration of Muon


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that determine memory. `base`, `adapters` and `matrices` count its
    weights, the adapters' weights and the weights that Muon steps. `mlp_width` counts the MLP units
    that a token uses, `cache_width` a token's key and value elements in one layer."""

    base: int
    adapters: int
    matrices: int
    layers: int
    width: int
    mlp_width: int
    cache_width: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        return self.base + self.adapters

    @property
    def trained(self) -> int:
        """The weights that self-play trains."""
        return self.adapters or self.base


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory demand of a run with these settings, with the engine's settings chosen, on `ranks`
    GPUs with `total` GiB each."""

    config: Config
    shape: Shape
    ranks: int
    total: float

    @classmethod
    def of(cls, config: Config, shape: Shape, *, total: float) -> Demand:
        kind = engine_kind(config.engine.kind)
        ranks = config.parallel.tp * (config.parallel.fsdp or 1)
        load = load_of(
            config,
            shape.parameters,
            replicas=max(1, ranks // config.engine.tp_size),
            continues=True,
            cores=CORES,
            gpu=True,
        )
        return cls(replace(config, engine=kind.choose(config.engine, load)), shape, ranks, total)

    @property
    def engine(self) -> EngineConfig:
        return self.config.engine

    @property
    def element(self) -> int:
        """The bytes of an element in the compute dtype."""
        return DTYPES[self.config.model.dtype].itemsize

    @property
    def base(self) -> object:
        """Equal for policies that share the base of their adapters, or the reference of a KL."""
        config, adapted = self.config, self.shape.adapters > 0
        folder = Path(config.model.path or "")
        return Base.of(config, folder), config.model.scratch, config.warm_start, adapted


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB used on one GPU by phase and part, and its total GiB."""

    phases: Mapping[str, Mapping[str, float]]
    total: float

    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    def needed(self) -> dict[str, float]:
        """What each phase needs, without what torch's allocator holds beside it."""
        return {
            phase: sum(gib for part, gib in parts.items() if part != ALLOCATOR)
            for phase, parts in self.phases.items()
        }

    def fits(self) -> bool:
        return self.peak() <= self.total - SPARE

    def table(self) -> str:
        """One line per phase with its parts, in GiB."""
        lines = [f"memory of one GPU with {self.total:.0f} GiB, estimated in GiB:"]
        width = max(11, *(len(phase) + 1 for phase in self.phases))
        for phase, parts in self.phases.items():
            shown = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)
            lines.append(f"  {phase:<{width}}{sum(parts.values()):>7.1f}  = {shown}")
        return "\n".join(lines)


def shape_of(text: Any, *, base: int, adapters: int, matrices: int) -> Shape:
    """The shape of a model from its text config."""
    experts = getattr(text, "num_experts_per_tok", None)
    expert_width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    return Shape(
        base=base,
        adapters=adapters,
        matrices=matrices,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        mlp_width=experts * expert_width if experts else text.intermediate_size,
        cache_width=cache_width(text),
        vocabulary=text.vocab_size,
    )


def gpu_gib(nominal_gb: float) -> float:
    """The GiB that a GPU of this nominal size in GB reports: 79.2 for 80, 139.6 for 141."""
    return 0.99 * nominal_gb


def estimate(demand: Demand) -> Memory:
    """The memory of each phase of a step on one GPU, and of the warm start before the first.

    The warm start has no reference or critic, and an engine only if it `fits_beside`; without
    `warm_start.lora` it trains the model's weights instead of adapters. Muon keeps one moment per
    matrix.
    """
    config, shape, ranks = demand.config, demand.shape, demand.ranks
    engine, parallel, warm = demand.engine, config.parallel, config.warm_start
    master = DTYPES[config.optim.master_dtype].itemsize
    weights = master * shape.parameters / ranks / GIB
    moments = 8 * shape.trained / ranks / GIB
    reference = weights if config.algorithm.kl and not shape.adapters else 0.0
    has_critic = config.algorithm.advantage == "ppo"
    critic = (2 * master + 8) * shape.parameters / ranks / GIB if has_critic else 0.0
    own = engine_parts(demand)
    asleep = own.get("engine's graphs", 0.0)
    copy = kept_copy(demand)
    scored = sleeps(engine) and parallel.offload != "all"
    in_play = {
        "context": CONTEXT,
        "weights": 0.0 if parallel.offload == "all" else weights,
        "moments": moments if parallel.offload == "none" else 0.0,
        "critic": critic,
        **own,
        "sync check above the passes": max(0.0, copy - own["engine's passes"]) if scored else 0.0,
    }
    update = {
        "context": CONTEXT,
        "weights": weights,
        "gradients": master * shape.trained / ranks / GIB,
        "moments": moments,
        "reference": reference,
        "critic": critic,
        **_pass(demand),
        # The reference is read inside the policy's pass; with adapters it is the same model.
        "copies in the compute dtype": copy * (2 if reference else 1),
        "engine's weights": 0.0 if sleeps(engine) else own["engine's weights"],
        "engine asleep": asleep,
    }
    push = {
        "context": CONTEXT,
        "weights": weights,
        "moments": moments if parallel.offload == "none" else 0.0,
        "buckets": 2 * min(BUCKET_BYTES, demand.element * shape.parameters) / GIB,
        "engine's weights": own["engine's weights"],
        "engine asleep": asleep,
    }
    for phase in (in_play, update, push):
        phase["partners"] = partners_part(demand)
    phases = {"play": in_play, "update": update, "push": push}
    if warm.imitates:
        loaded, trained = shape.parameters, shape.trained
        if not warm.lora:
            loaded = trained = shape.base
        muon = warm.optimizer == "muon"
        of_moments = 8 * trained - (4 * shape.matrices if muon else 0)
        imitation = {
            "context": CONTEXT,
            "weights": master * loaded / ranks / GIB,
            "gradients": master * trained / ranks / GIB,
            "moments": of_moments / ranks / GIB,
            **_pass(demand),
            "copies in the compute dtype": copy,
        }
        if fits_beside(config):
            imitation["engine asleep"] = asleep
        if muon:  # Muon steps after the pass, when its memory is free
            step = _MUON_COPIES * 2 * min(MAX_AT_ONCE, shape.matrices) / GIB
            passed = imitation["activations"] + imitation["logits"]
            imitation["Muon's step above the pass"] = max(0.0, step - passed)
        phases = {"warm start": imitation, **phases}
    return Memory(phases, demand.total)


def estimate_policies(demands: Mapping[str, Demand]) -> Memory:
    """The memory of each phase of a step with these policies, by name, in the order of their steps.

    While they update, one after the other, the weights of all are on the GPU, and the moments and
    the critic of the others unless `parallel.offload` moves them. The base of adapters is there
    once.

    In play and push all engines are awake, and `parallel.offload` says what else is there; only the
    cache of the last one sleeps in its push. Buckets and the copies of a sync check are those of
    one policy, since they come one after the other. The engines' passes are those of one, since
    they share the games.
    """
    demands = shared_out(demands)
    every = {name: estimate(demand).phases for name, demand in demands.items()}
    at_rest = [each for each in demands.values() if each.config.parallel.offload != "all"]

    def summed(phase: str, *in_turn: str) -> dict[str, float]:
        """The policies' parts of a phase together; of the parts `in_turn` the largest."""
        found = [parts[phase] for parts in every.values()]
        values = {part: [each.get(part, 0.0) for each in found] for each in found for part in each}
        total = {part: (max if part in in_turn else sum)(of) for part, of in values.items()}
        return {**total, "context": CONTEXT}

    play = summed("play", "sync check above the passes", "engine's passes")
    push = summed("push", "buckets")
    play["weights"], push["weights"] = _held(at_rest), _held(demands.values())
    if caches := [parts["play"].get("engine's cache", 0.0) for parts in every.values()][:-1]:
        push["engine's cache"] = sum(caches)
    updating, phases = summed("update"), dict[str, Mapping[str, float]](play=play)
    for name, demand in demands.items():
        moved = demand.config.parallel.offload != "none"
        phases[f"update/{name}"] = {
            **every[name]["update"],
            **{part: updating[part] for part in (*ENGINES, *(() if moved else MOVABLE))},
            "weights": _held(demands.values()),
        }
    phases["push"] = push
    starts = [parts["warm start"] for parts in every.values() if "warm start" in parts]
    if starts:  # one after the other, before anything else is loaded
        if len(demands) > 1:
            starts = [{**parts, "engine asleep": 0.0} for parts in starts]  # it starts later
        phases = {"warm start": max(starts, key=lambda parts: sum(parts.values())), **phases}
    (total,) = {demand.total for demand in demands.values()}
    return Memory(phases, total)


def shared_out(demands: Mapping[str, Demand]) -> dict[str, Demand]:
    """The demands with the engines' shares of a GPU: as given, or each divided by their number if
    together they are above MOST_SHARE."""
    if sum(share_of(demand.engine) for demand in demands.values()) <= MOST_SHARE:
        return dict(demands)
    shares = {name: share_of(demand.engine) / len(demands) for name, demand in demands.items()}
    changed = {n: _changed(d, {"engine.mem_fraction": shares[n]}) for n, d in demands.items()}
    return {name: found or demands[name] for name, found in changed.items()}


def _held(demands: Iterable[Demand]) -> float:
    """GiB of the weights of policies, with a base that adapters share held once."""
    total, bases = 0.0, set[object]()
    for demand in demands:
        shared = demand.shape.adapters and demand.base in bases
        num = demand.shape.adapters if shared else demand.shape.parameters
        bases.add(demand.base)
        total += DTYPES[demand.config.optim.master_dtype].itemsize * num / demand.ranks / GIB
    return total


def kept_copy(demand: Demand) -> float:
    """GiB of the copy of the weights in the compute dtype that a single data-parallel rank keeps
    during a pass (selfplay/distributed/shard.py); 0 if the master weights have that dtype."""
    config = demand.config
    if demand.ranks != config.parallel.tp or config.model.dtype == config.optim.master_dtype:
        return 0.0
    return demand.element * demand.shape.parameters / demand.ranks / GIB


def _pass(demand: Demand) -> dict[str, float]:
    """GiB of a forward and backward pass of one micro-batch, without weights, gradients and
    `kept_copy`. A pass ends with the gradients of FSDP's root, which are summed in fp32 after its
    activations are freed. The root has the embeddings and the head, or all of a small model."""
    shape, tp = demand.shape, demand.config.parallel.tp
    tokens, computed = demand.config.optim.tokens_per_microbatch, demand.element
    one_unit = computed * shape.parameters / tp <= ONE_UNIT
    root = (shape.parameters if one_unit else 2 * shape.vocabulary * shape.width) / tp / GIB
    every = tokens * shape.vocabulary / tp
    kept = min(KEPT, every) if shape.width <= KEPT_WIDTH and tp == 1 else 0
    # Logits in fp32; the backward pass, unless gradients are kept, has two more and one in bf16.
    logits = min(LIVE_LOGITS["cuda"], every) * (4 if kept else 12 + computed)
    layers = 0.0 if one_unit or kept_copy(demand) else 3 * computed * _layer(shape) / tp / GIB
    parts = {
        "activations": activations(demand, tokens),
        "logits": logits / GIB,
        "kept gradients of logits": computed * kept / GIB,
        "gathered layers": layers,
        "gathered root": 0.0 if one_unit and kept_copy(demand) else computed * root,
    }
    summed = 0.0 if shape.adapters else (computed + 2 * 4) * root
    passed = sum(parts.values()) - parts["gathered root"]
    above = {"gradients of the root above the pass": max(0.0, summed - passed)}
    return parts | above | {ALLOCATOR: 0.1 * parts["activations"]}


def sleeps(engine: EngineConfig) -> bool:
    """Whether the engine has separate processes, whose memory is free during the update."""
    return not engine_kind(engine.kind).in_trainer


def share_of(engine: EngineConfig) -> float:
    """The fraction of free memory that the engine takes for its weights and cache."""
    return getattr(engine, "mem_fraction", 0.0)


def engine_parts(demand: Demand) -> dict[str, float]:
    """The engine's memory in play. SGLang takes a fraction of the free memory at its start, unless
    the size of its cache is set. The transformers engine has a copy of all weights in fp32, which
    never sleeps; its cache, bounded by `engine.max_batch`, is not counted."""
    engine, rollout = demand.engine, demand.config.rollout
    if not sleeps(engine):
        return {"engine's weights": 4 * demand.shape.base / GIB, "engine's passes": 0.0}
    per_gpu = demand.element * demand.shape.parameters / engine.tp_size / GIB
    weights = engine.copies * per_gpu
    free = demand.total - CONTEXT - partners_part(demand)
    cache = max(0.0, share_of(engine) * free - weights)
    games = rollout.instances * rollout.group_size * engine.tp_size // demand.ranks
    return {
        "engine's weights": weights,
        "engine's cache": min(cache, _set_cache(demand) or cache),
        "engine's graphs": _graphs(demand, engine.copies),
        "engine's passes": _LOGITS
        * 4
        * demand.shape.vocabulary
        * min(games, engine.max_batch)
        / GIB,
    }


def _graphs(demand: Demand, copies: int) -> float:
    """GiB that so many engine processes keep while they sleep. Several of them share the requests
    unevenly (`launch.config_of_each`).

    Measured: 2.4 with 512 requests, a vocabulary of 151,936 and graphs of prefills, 1.05 with 96
    requests and none (docs/notes/2026-11-29-two-policies-on-one-gpu.md).
    """
    engine = demand.engine
    prefills = PREFILLS if getattr(engine, "prefill_graphs", False) else 0.0
    requests = engine.max_batch * (1 if copies == 1 else 1.25)
    return (ASLEEP + prefills) * copies + _GRAPHS * demand.shape.vocabulary * requests / GIB


def _set_cache(demand: Demand) -> float:
    """GiB on one GPU of a cache of `engine.max_cache_tokens`; 0 if they are not set."""
    return getattr(demand.engine, "max_cache_tokens", 0) * _token_bytes(demand) / GIB


def partners_part(demand: Demand) -> float:
    """GiB of the frozen checkpoints that play in training, each assumed to be as large as the
    policy, which never sleep: weights, and with SGLang a separate engine
    (`launch.config_of_partner`)."""
    engine, rollout = demand.engine, demand.config.rollout
    each = demand.element * demand.shape.base / engine.tp_size / GIB
    if sleeps(engine):
        transcripts = engine.max_batch * rollout.max_game_tokens * _token_bytes(demand) / GIB
        cache = min(share_of(engine) / 4 * demand.total, transcripts)
        each += (_set_cache(demand) or cache) + _graphs(demand, 1)
    return each * sum(spec.kind == CHECKPOINT for spec, _ in parse_shares(rollout.partners))


def cache_tokens(demand: Demand) -> float:
    """The capacity of SGLang's cache in tokens."""
    return engine_parts(demand).get("engine's cache", 0.0) * GIB / _token_bytes(demand)


def _token_bytes(demand: Demand) -> float:
    """The bytes of one token in an engine's cache on one GPU."""
    shape = demand.shape
    return demand.element * shape.layers * shape.cache_width / demand.engine.tp_size


def activations(demand: Demand, tokens: float) -> float:
    """GiB of activations that a forward pass of `tokens` tokens keeps for the backward pass."""
    shape, parallel = demand.shape, demand.config.parallel
    per_mlp, per_width = (6, 12) if demand.config.model.liger else (8, 18)
    divided = per_mlp * shape.mlp_width + (per_width - _HIDDEN) * shape.width + 1536
    layer = _HIDDEN * shape.width + divided / parallel.tp
    recomputed = {"none": 0, "half": (shape.layers + 1) // 2, "full": shape.layers}
    num = recomputed[parallel.checkpointing]
    kept = (shape.layers - num) * layer + num * 2 * shape.width + (layer if num else 0)
    return tokens * kept / GIB


def why_not(demand: Demand) -> str | None:
    """Why the run does not fit; None if it does."""
    return _too_large(estimate(demand)) or _small_cache(demand)


def why_not_policies(demands: Mapping[str, Demand]) -> str | None:
    """Why a run with these policies, by name, does not fit; None if it does."""
    caches = (_small_cache(demand) for demand in shared_out(demands).values())
    return _too_large(estimate_policies(demands)) or next(filter(None, caches), None)


def _too_large(memory: Memory) -> str | None:
    """Why a GPU has too little memory; None if it has enough."""
    if memory.fits():
        return None
    phase, parts = max(memory.phases.items(), key=lambda item: sum(item[1].values()))
    return (
        f"the phase {phase} needs about {sum(parts.values()):.0f} GiB, on a GPU with "
        f"{memory.total:.0f} GiB of which {SPARE:.0f} must stay free"
    )


def _small_cache(demand: Demand) -> str | None:
    """Why the engine's cache is too small for the games; None if it is not."""
    engine = demand.engine
    if sleeps(engine):
        least = LEAST_GAMES * demand.config.rollout.max_game_tokens
        tokens = cache_tokens(demand)
        if tokens < least:
            return (
                f"engine.mem_fraction must leave a cache of at least {least:,} tokens "
                f"({LEAST_GAMES} transcripts of rollout.max_game_tokens), got "
                f"{share_of(engine):g}, which leaves {tokens:,.0f}"
            )
    return None


def remedy(demand: Demand) -> list[str]:
    """Necessary overrides with which the run fits; [] if the usual ones do not suffice.

    They are tried from the cheapest to the most expensive: the engine's share, recomputed
    activations, fewer tokens per pass, bf16 master weights, moments on the host, weights on the
    host. Overrides that the settings refuse are skipped.
    """
    engine, tokens = demand.engine, demand.config.optim.tokens_per_microbatch
    steps: tuple[dict[str, Any], ...] = (
        {},
        {"parallel.checkpointing": "full"},
        {"optim.tokens_per_microbatch": max(_LEAST_TOKENS, min(tokens, 8192))},
        {"optim.master_dtype": "bfloat16"},
        {"parallel.offload": "optimizer"},
        {"parallel.offload": "all"},
    )

    def fraction(words: Mapping[str, Any]) -> float | None:
        for share in _fractions(engine):
            of_engine = {"engine.mem_fraction": share} if sleeps(engine) else {}
            changed = _changed(demand, {**words, **of_engine})
            if changed is not None and why_not(changed) is None:
                return share
        return None

    chosen: dict[str, Any] = {}
    for step in steps:
        if _changed(demand, chosen | step) not in (None, demand):
            chosen |= step
        if fraction(chosen) is None:
            continue
        for key in list(chosen):  # drop overrides that a later one makes unnecessary
            fewer = {name: value for name, value in chosen.items() if name != key}
            if fraction(fewer) is not None:
                chosen = fewer
        share = fraction(chosen)
        if share != share_of(engine):
            chosen["engine.mem_fraction"] = share
        return [f"{name}={str(value).lower()}" for name, value in chosen.items()]
    return []


def _fractions(engine: EngineConfig) -> Sequence[float]:
    """The configured share of the engine, then smaller and larger ones."""
    if not sleeps(engine):
        return (share_of(engine),)
    return (share_of(engine), 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.6, 0.7, 0.8)


def _layer(shape: Shape) -> float:
    """The number of weights of one layer, without embeddings."""
    return (shape.parameters - shape.vocabulary * shape.width) / shape.layers


def _changed(demand: Demand, values: Mapping[str, Any]) -> Demand | None:
    """The demand with these settings changed; None if they contradict each other."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    try:
        parts = {s: replace(getattr(demand.config, s), **named) for s, named in sections.items()}
        return replace(demand, config=replace(demand.config, **parts))
    except ValueError:
        return None
