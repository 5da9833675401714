"""Settings of the model, the engine, the ranks and Weights & Biases."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.schema import RULES, key, section

MAX_PARAMETERS = 10_000_000_000  # of a model with random initial weights


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class ScratchConfig:
    """A model with random initial weights and its own byte-level BPE tokenizer."""

    arch: Literal["qwen2", "qwen3", "llama"] = key(
        "qwen2",
        "architecture; qwen3 normalizes queries and keys",
    )
    width: int = key(96, "hidden size", within=(8, 32_768))
    layers: int = key(3, "number of layers", within=(1, 256))
    heads: int = key(
        4, "attention heads; width must be a multiple of twice this number", within=(1, 1_024)
    )
    kv_heads: int = key(4, "key-value heads; must divide heads", within=(1, 1_024))
    mlp_width: int = key(256, "hidden size of the feed-forward block", within=(8, 131_072))
    max_positions: int = key(1024, "maximum context length in tokens", within=(16, 1_000_000))
    init_range: float = key(0.08, "standard deviation of the initial weights", within=(0.0, 10.0))
    vocab_size: int = key(
        512,
        "vocabulary size of the byte-level BPE tokenizer; includes tokens for the game's own "
        "phrases",
        within=(2, 500_000),
    )
    tokenizer_games: int = key(
        500, "scripted games whose text trains the tokenizer", within=(1, 100_000)
    )
    split_lines: bool = key(
        False,
        'make a line of a proposal, such as "column: row", two tokens instead of one where the '
        "game's texts are short; small models on large boards then see which row is taken",
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        step = 2 * self.heads  # RoPE rotates pairs of a head's dimensions
        if self.width % step:
            raise ValueError(
                f"model.scratch.width must be an even multiple of heads ({self.heads}), got "
                f"{self.width}; the nearest is {max(1, round(self.width / step)) * step}"
            )
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.kv_heads))
            raise ValueError(
                f"model.scratch.kv_heads must divide heads ({self.heads}), got {self.kv_heads}; "
                f"the nearest is {nearest}"
            )
        layer = 4 * self.width**2 + 3 * self.width * self.mlp_width
        parameters = self.layers * layer + self.vocab_size * self.width
        if parameters > MAX_PARAMETERS:
            raise ValueError(
                f"model.scratch.width, layers, mlp_width and vocab_size must make at most "
                f"{MAX_PARAMETERS:.0e} parameters, got about {parameters:.1e}"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class LoraConfig:
    """Low-rank adapters (LoRA); self-play trains them and keeps the base weights fixed."""

    rank: int = key(16, "rank of the adapters", within=(1, 4_096))
    alpha: int = key(32, "an adapter's output is scaled by alpha / rank", within=(1, 65_536))
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "linear layers of each block that get an adapter",
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        if not self.targets:
            raise ValueError(
                "model.lora.targets must name a linear layer, got []; model.lora=null trains all "
                "weights"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class ModelConfig:
    """The policy: a pretrained model or a model with random initial weights."""

    path: str | None = key(
        None, "Hugging Face id, local folder or .gguf file; null with model.scratch"
    )
    scratch: ScratchConfig | None = section(
        ScratchConfig, "architecture of a model with random initial weights", optional=True
    )
    dtype: Literal["float32", "bfloat16"] = key("float32", "dtype of computation")
    chat_template: dict[str, object] = key(
        {}, "extra arguments for the chat template, such as enable_thinking"
    )
    lora: LoraConfig | None = section(
        LoraConfig, "LoRA adapters; null trains all weights", optional=True
    )
    liger: bool = key(
        True,
        "use Liger's fused RMSNorm, RoPE and SwiGLU kernels if a GPU and the package are present",
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class EngineConfig:
    """The inference engine that generates the policy's turns."""

    kind: Literal["hf", "sglang"] = key(
        "hf",
        "hf generates with transformers in the trainer's process; sglang starts SGLang",
    )
    max_batch: int = key(
        512,
        "most games that the hf engine plays, and most prompts that it generates, at once; most "
        "requests that SGLang runs at once",
        within=(1, 65_536),
    )
    mem_fraction: float = key(
        0.7,
        "fraction of the free GPU memory that SGLang takes for weights and KV cache",
        within=(0.05, 0.95),
    )
    tp_size: int = key(
        1,
        "tensor-parallel size of SGLang: number of neighbouring ranks that share one engine",
        within=(1, 1_024),
    )
    processes: int = key(
        1,
        "SGLang engines on one GPU, for a small model: each has a scheduler on a CPU core of its "
        "own, a copy of the weights and an equal part of engine.mem_fraction, engine.max_batch and "
        "the games; above 1 only with engine.tp_size=1",
        within=(1, 16),
    )
    attention: Literal["auto", "fa3", "flashinfer", "triton"] = key(
        "auto", "SGLang attention backend"
    )
    max_cache_tokens: int = key(
        0,
        "size of SGLang's KV cache in tokens; 0 uses all memory that engine.mem_fraction leaves",
        within=(0, 1_000_000_000),
    )
    burst_share: float = key(
        0.0,
        "hold requests back until they are this share of those in SGLang, then send them together, "
        "so that their prefills share a batch and interrupt decoding less often; 0 sends each at "
        "once",
        within=(0.0, 1.0),
    )
    sessions: bool = key(
        False,
        "keep each seat's context in SGLang between its turns (a streaming session), so that a "
        "turn sends only its new tokens and skips the prefix cache, which saves scheduler time; "
        "sessions fill at most 0.8 of the KV cache, further games do without; not with branches, "
        "nor with a chat template that rewrites old turns",
    )
    prefill_graphs: bool = key(
        False,
        "capture SGLang's prefills of at most 2,048 tokens as CUDA graphs, which saves scheduler "
        "time in each turn after the first",
    )
    server_args: dict[str, object] = key(
        {}, "extra arguments of SGLang's server, under SGLang's names; they override this project's"
    )
    deterministic: bool = key(
        False, "use SGLang's batch-invariant kernels and a seed for each request; slower"
    )
    timeout_s: float = key(
        600.0,
        "seconds to wait for the engine's answer to a generation or weight-sync request "
        "before the engine is restarted",
        within=(1.0, 86400.0),
    )
    max_mismatch: float = key(
        0.05,
        "largest mean log-prob mismatch |engine - trainer| over the games of a step, in nats per "
        "token; if it is above this and above the measured noise floor, the run saves its state "
        "and stops",
        within=(0.0, 1000.0),
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.processes > 1 and self.tp_size > 1:
            raise ValueError(
                f"engine.processes must be 1 with engine.tp_size {self.tp_size}, got "
                f"{self.processes}: several engines share one GPU only"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class ParallelConfig:
    """How the update is distributed; tp * fsdp must equal the number of ranks."""

    tp: int = key(
        1, "tensor-parallel size of the trainer: ranks that split each layer", within=(1, 1_024)
    )
    fsdp: int | None = key(
        None,
        "FSDP size: ranks that shard parameters and split the batch; null is all ranks "
        "divided by tp",
        within=(1, 65_536),
    )
    offload: Literal["none", "optimizer", "all"] = key(
        "none",
        "what is in host memory during the rollout, besides the reference model: the optimizer "
        "state, or all, the master weights too; with all, the log-probs of engine and trainer are "
        "compared only in the update",
    )
    checkpointing: Literal["none", "full"] = key(
        "none",
        "activation checkpointing: full recomputes each layer's activations in the backward pass",
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class TrackConfig:
    """A tracker that gets what metrics.jsonl and games.jsonl get. Nothing is tracked by default."""

    kind: Literal["wandb", "trackio", "tensorboard", "off"] = key(
        "off",
        "where metrics, settings and games are shown: Weights & Biases, Trackio, TensorBoard or "
        "nowhere",
    )
    project: str = key("selfplay", "project name in Weights & Biases and in Trackio")
