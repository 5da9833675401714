"""GPU memory of a run by phase, computed from the model's config and the settings before anything
is loaded, and the settings that would make a run fit.

Sizes are in GiB, for one GPU. Static sizes are exact sums of bytes. Activations are a formula
fitted to measured peaks (docs/gpu.md): of a layer, 4 bytes per unit of the MLP's width (8 without
Liger), 12 per unit of the model's width and 9 KiB for each token, 10 % for the allocator. Loads
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfplay.config import Config, EngineConfig, OptimConfig, ParallelConfig

GIB = 2**30
CONTEXT = 1.0  # CUDA context and kernels of the trainer
ASLEEP = 2.0  # what a sleeping SGLang keeps: context and decode graphs
SPARE = 2.0  # for the allocator's fragments and the graphs of NCCL
BUCKET = 2.0  # one bucket of a push
LEAST_GAMES = 8  # transcripts of full length that the engine's cache should hold at least
_BYTES = {"float32": 4, "bfloat16": 2}
_LOGPROB = 1.5 / 16_384  # GiB a trained token's log-prob needs at 152,000 words, measured
_LEAST_TOKENS = 2048  # of a micro-batch


@dataclass(frozen=True, slots=True)
class Shape:
    """What memory depends on. `parameters` counts all weights, `trained` those with a gradient,
    `mlp_width` the units that one token uses, `cache_width` the keys and values of a token in one
    layer."""

    parameters: int
    trained: int
    layers: int
    width: int
    mlp_width: int
    cache_width: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB of one GPU by phase and part, and the GiB that it has."""

    phases: Mapping[str, Mapping[str, float]]
    total: float

    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    def fits(self) -> bool:
        return self.peak() <= self.total - SPARE

    def table(self) -> str:
        """One line for each part of each phase, in GiB."""
        lines = [f"memory of one GPU with {self.total:.0f} GiB, estimated in GiB:"]
        for phase, parts in self.phases.items():
            shown = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)
            lines.append(f"  {phase:<9}{sum(parts.values()):>7.1f}  = {shown}")
        return "\n".join(lines)


def shape_of(text: Any, *, parameters: int, trained: int) -> Shape:
    """The shape of a model from the config of its text part."""
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = getattr(text, "num_experts_per_tok", None)
    expert_width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    return Shape(
        parameters=parameters,
        trained=trained,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        mlp_width=experts * expert_width if experts else text.intermediate_size,
        cache_width=2 * head * (getattr(text, "num_key_value_heads", None) or heads),
        vocabulary=text.vocab_size,
    )


def gpu_gib(sold_gb: float) -> float:
    """The GiB that a GPU sold with so many GB reports: 79.2 of 80, 139.6 of 141."""
    return 0.99 * sold_gb


def estimate(config: Config, shape: Shape, *, ranks: int, total: float, liger: bool) -> Memory:
    """The memory of each phase of a step on one of `ranks` GPUs with `total` GiB each.

    With adapters the warm start, which trains all weights, is a phase of its own.
    """
    optim, parallel, engine = config.optim, config.parallel, config.engine
    master = _BYTES[optim.master_dtype]
    frozen = shape.parameters - shape.trained
    weights = master * (shape.trained + frozen) / ranks / GIB
    gradients = master * shape.trained / ranks / GIB
    moments = 8 * shape.trained / ranks / GIB
    second = config.algorithm.kl > 0 and config.model.lora is None
    reference = master * shape.parameters / ranks / GIB if second else 0.0
    critic = 0.0
    if config.algorithm.method == "ppo" and config.critic.kind == "model":
        critic = (2 * master + 8) * shape.parameters / ranks / GIB
    gathered = 0.0 if ranks == 1 else 3 * _BYTES[config.model.dtype] * _layer(shape) / GIB
    asleep = ASLEEP * engine.processes if engine.kind == "sglang" else 0.0
    own = engine_parts(engine, shape, config.model.dtype, total=total)
    in_play = {
        "context": CONTEXT,
        "weights": 0.0 if parallel.offload_parameters else weights,
        "moments": 0.0 if parallel.offload_optimizer else moments,
        "reference": 0.0 if parallel.offload_reference else reference,
        "critic": critic,
        **own,
    }
    tokens = optim.tokens_per_microbatch / config.parallel.tp
    update = {
        "context": CONTEXT,
        "weights": weights,
        "gradients": gradients,
        "moments": moments,
        "reference": reference,
        "critic": critic,
        "activations": 1.1 * activations(shape, tokens, parallel, liger=liger),
        "logits": _LOGPROB * tokens * max(shape.vocabulary / 152_000, 0.1),
        "gathered layers": gathered,
        "engine asleep": asleep,
    }
    push = {
        "context": CONTEXT,
        "weights": weights,
        "moments": 0.0 if parallel.offload_optimizer else moments,
        "buckets": 2 * min(BUCKET, _BYTES[config.model.dtype] * shape.parameters / GIB),
        "engine's weights": own.get("engine's weights", 0.0),
        "engine asleep": asleep,
    }
    phases = {"play": in_play, "update": update, "push": push}
    if config.model.lora is not None and config.warm_start.imitates:
        all_weights = replace(config, model=replace(config.model, lora=None))
        whole = replace(shape, trained=shape.parameters)
        parts = estimate(all_weights, whole, ranks=ranks, total=total, liger=liger).phases["update"]
        phases["imitation"] = {name: parts[name] for name in parts if name != "engine asleep"}
    return Memory(phases, total)


def engine_parts(
    engine: EngineConfig, shape: Shape, dtype: str, *, total: float
) -> dict[str, float]:
    """The engine's own memory in play. SGLang takes a fraction of what is free at its start; the
    transformers engine uses the trainer's weights."""
    if engine.kind != "sglang":
        return {}
    weights = engine.processes * _BYTES[dtype] * shape.parameters / engine.tp_size / GIB
    share = engine.mem_fraction * (total - CONTEXT)
    return {
        "engine's weights": weights,
        "engine's cache": max(0.0, share - weights),
        "engine's graphs": ASLEEP * engine.processes,
    }


def cache_tokens(engine: EngineConfig, shape: Shape, dtype: str, *, total: float) -> float:
    """How many tokens SGLang's cache holds."""
    cache = engine_parts(engine, shape, dtype, total=total).get("engine's cache", 0.0)
    per_token = _BYTES[dtype] * shape.layers * shape.cache_width / engine.tp_size
    return cache * GIB / per_token


def activations(shape: Shape, tokens: float, parallel: ParallelConfig, *, liger: bool) -> float:
    """GiB that a pass of so many tokens keeps for its backward pass."""
    layer = (4 if liger else 8) * shape.mlp_width + 12 * shape.width + 9 * 1024
    kept = shape.layers * layer
    if parallel.checkpointing == "full":
        kept = shape.layers * 2 * shape.width + layer
    return tokens * kept / GIB


def why_not(config: Config, shape: Shape, *, ranks: int, total: float, liger: bool) -> str | None:
    """Why the run does not fit; None if it does."""
    if config.engine.kind == "sglang":
        tokens = cache_tokens(config.engine, shape, config.model.dtype, total=total)
        least = LEAST_GAMES * config.rollout.max_game_tokens
        if tokens < least:
            return (
                f"engine.mem_fraction must leave a cache of at least {least:,} tokens "
                f"({LEAST_GAMES} transcripts of rollout.max_game_tokens), got "
                f"{config.engine.mem_fraction:g}, which leaves {tokens:,.0f}"
            )
    memory = estimate(config, shape, ranks=ranks, total=total, liger=liger)
    if memory.fits():
        return None
    phase, parts = max(memory.phases.items(), key=lambda item: sum(item[1].values()))
    return (
        f"the phase {phase} needs about {sum(parts.values()):.0f} GiB of a GPU with {total:.0f}, "
        f"{SPARE:.0f} of them spare"
    )


def remedy(config: Config, shape: Shape, *, ranks: int, total: float, liger: bool) -> list[str]:
    """Overrides with which the run fits, as few as do; [] if none of the usual ones is enough.

    They are tried from what costs least to what costs most: the engine's share, recomputed
    activations, fewer tokens a pass, bf16 master weights, moments on the host, weights on the host.
    """
    tokens = config.optim.tokens_per_microbatch
    steps: list[tuple[str, Any]] = [
        ("parallel.checkpointing", "full"),
        ("optim.tokens_per_microbatch", max(_LEAST_TOKENS, min(tokens, 8192))),
        ("optim.master_dtype", "bfloat16"),
        ("parallel.offload_optimizer", True),
        ("parallel.offload_parameters", True),
    ]

    def fraction(words: Mapping[str, Any]) -> float | None:
        for share in _fractions(config.engine):
            tried = _changed(config, {**words, "engine.mem_fraction": share})
            if why_not(tried, shape, ranks=ranks, total=total, liger=liger) is None:
                return share
        return None

    chosen: dict[str, Any] = {}
    for step in (None, *steps):
        if step is not None and _value(config, step[0]) != step[1]:
            chosen[step[0]] = step[1]
        if fraction(chosen) is None:
            continue
        for key in list(chosen):  # what a later step has made needless
            fewer = {name: value for name, value in chosen.items() if name != key}
            if fraction(fewer) is not None:
                chosen = fewer
        share = fraction(chosen)
        if share != config.engine.mem_fraction:
            chosen["engine.mem_fraction"] = share
        return [f"{name}={str(value).lower()}" for name, value in chosen.items()]
    return []


def _fractions(engine: EngineConfig) -> Sequence[float]:
    """The engine's share as it is, then smaller and larger ones."""
    if engine.kind != "sglang":
        return (engine.mem_fraction,)
    return (engine.mem_fraction, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.6, 0.7, 0.8)


def _layer(shape: Shape) -> float:
    """The weights of one layer, without embeddings."""
    return (shape.parameters - shape.vocabulary * shape.width) / shape.layers


_SECTIONS = {"engine": EngineConfig, "optim": OptimConfig, "parallel": ParallelConfig}


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _changed(config: Config, values: Mapping[str, Any]) -> Config:
    for key, value in values.items():
        section, _, name = key.partition(".")
        assert section in _SECTIONS
        part = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: part})
    return config
