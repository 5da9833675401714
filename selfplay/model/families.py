"""Model families: detects those that cannot be trained here.

When a run starts, every family is compared with transformers' own forward pass
(`selfplay.preflight.model`); docs/models.md lists the tested ones.
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = {"full_attention", "sliding_attention"}
CHANGING = {"dynamic", "longrope"}


def why_not(model: PreTrainedModel, *, sharded: bool, max_tokens: int) -> str | None:
    """Why this model, which may be on the meta device, cannot be trained with these settings.

    None if it can. `sharded`: FSDP shards the parameters (any GPU, or several processes).
    `max_tokens` is the length of the longest transcript.
    """
    config = model.config
    weights = list(model.named_parameters())
    names = [name for name, _ in weights]
    if getattr(config, "quantization_config", None):
        return "its weights are quantized (quantization_config): use an unquantized folder"
    if any(name.rpartition(".")[2] == "sinks" for name in names):
        return "its attention has sinks, which packed attention does not support"
    unknown = set(getattr(config, "layer_types", None) or []) - ATTENTION
    if unknown:
        return f"its layers of type {', '.join(sorted(unknown))} mix the sequences of a packed row"
    stateful = any(isinstance(module, nn.Conv1d) for module in model.modules())
    if stateful or any(name.endswith("A_log") for name in names):
        return "its state-space or convolution layers mix the sequences of a packed row"
    if dropout_keys := _dropout(model):
        return f"it has dropout: set {', '.join(dropout_keys)} to 0 in its config.json"
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList) and sharded:
        return "its base model has no list `layers` to shard: train it in one CPU process"
    limit = _changing_positions(config)
    if limit is not None and limit < max_tokens:
        return (
            f"its rotary frequencies depend on the longest sequence of a row beyond {limit} "
            f"positions: set rollout.max_game_tokens to {limit}, got {max_tokens}"
        )
    return None


def head_width(config: PretrainedConfig) -> int:
    """The width of an attention head, from the config of a model's text part."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cache_width(config: PretrainedConfig) -> int:
    """The key and value elements per token and layer, from the config of a model's text part."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * heads * head_width(config)


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest context of a model by its config; None if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _dropout(model: PreTrainedModel) -> list[str]:
    """The config keys that set a dropout above 0."""
    has_dropout = any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any("dropout" in k and isinstance(v, float) and v > 0 for k, v in vars(module).items())
        for module in model.modules()
    )
    if not has_dropout:
        return []
    return [
        key
        for key, value in model.config.to_dict().items()
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float) and value > 0
    ]


def _changing_positions(config: PretrainedConfig) -> int | None:
    """The row length above which rotary frequencies depend on the length; None if they never do."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Some families have one mapping, others one per layer type.
    kinds = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    limits = [
        int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in CHANGING
    ]
    return min(limits, default=None)
