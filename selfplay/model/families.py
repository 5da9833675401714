"""What is known of model families: what they do to logits, and which cannot be trained here.

A family that is not named here is compared with transformers' own forward pass when a run starts
(`selfplay.preflight.model`); docs/models.md lists what was tested. Knows no meshes and no text.
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from selfplay.distributed.tensor_parallel import why_not_divided

ATTENTION = {"full_attention", "sliding_attention"}
CHANGING = {"dynamic", "longrope"}


def logit_rule(config: PretrainedConfig) -> tuple[float, float | None]:
    """What the family does to logits: x becomes cap * tanh(scale * x / cap), without a cap
    scale * x. Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`, Gemma caps.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return scale / divisor, getattr(config, "final_logit_softcapping", None)


def why_not(
    model: PreTrainedModel, *, sharded: bool, tp: int, engine: str, max_tokens: int
) -> str | None:
    """Why this model, which may be on the meta device, cannot be trained so; None where it may.

    `sharded` says that parameters are spread by FSDP (any GPU, or several processes); `max_tokens`
    is the longest transcript.
    """
    config = model.config
    weights = list(model.named_parameters())
    names = [name for name, _ in weights]
    if getattr(config, "quantization_config", None):
        return "its weights are quantized (quantization_config): use an unquantized folder"
    if any(name.rpartition(".")[2] == "sinks" for name in names):
        return "its attention has sinks, which no packed kernel here computes"
    strange = set(getattr(config, "layer_types", None) or []) - ATTENTION
    if strange:
        return f"its layers of type {', '.join(sorted(strange))} do not keep packed texts apart"
    stateful = any(isinstance(module, nn.Conv1d) for module in model.modules())
    if stateful or any(name.endswith("A_log") for name in names):
        return "its state-space or convolution layers do not keep packed texts apart"
    drops = _dropout(model)
    if drops:
        return f"it drops at random in training: set {', '.join(drops)} to 0 in its config.json"
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList) and sharded:
        return "its layers are not where they can be sharded: train it in one CPU process"
    limit = _changing_positions(config)
    if limit is not None and limit < max_tokens:
        return (
            f"its rotary frequencies change with the longest text of a row beyond {limit} "
            f"positions: set rollout.max_game_tokens to {limit}, got {max_tokens}"
        )
    if engine == "sglang" and any("experts" in n and p.ndim == 3 for n, p in weights):
        return "a push to SGLang does not carry merged experts: set engine.kind to hf"
    return why_not_divided(model) if tp > 1 else None


def _dropout(model: PreTrainedModel) -> list[str]:
    """The keys of a config that make some module drop in training."""
    acts = any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any("dropout" in k and isinstance(v, float) and v > 0 for k, v in vars(module).items())
        for module in model.modules()
    )
    if not acts:
        return []
    found = model.config.to_dict().items()
    return [
        key
        for key, value in found
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float) and value > 0
    ]


def _changing_positions(config: PretrainedConfig) -> int | None:
    """Up to how many positions rotary frequencies do not depend on the text's length."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Some families hold one mapping, others one for each type of layer.
    kinds = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    limits = [
        int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in CHANGING
    ]
    return min(limits, default=None)
