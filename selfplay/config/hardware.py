"""Settings of the model, the engine and the ranks."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.plugins import function_for
from selfplay.config.schema import RULES


@dataclass(frozen=True, slots=True, config=RULES)
class ScratchConfig:
    """A model with random initial weights and its own byte-level BPE tokenizer."""

    arch: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    """architecture; qwen3 normalizes queries and keys"""
    width: int = Field(default=96, ge=8, le=32_768)
    """hidden size"""
    layers: int = Field(default=3, ge=1, le=256)
    """number of layers"""
    heads: int = Field(default=4, ge=1, le=1_024)
    """attention heads; width must be a multiple of twice this number"""
    kv_heads: int = Field(default=4, ge=1, le=1_024)
    """key-value heads; must divide heads"""
    mlp_width: int = Field(default=256, ge=8, le=131_072)
    """hidden size of the feed-forward block"""
    max_positions: int = Field(default=1024, ge=16, le=1_000_000)
    """maximum context length in tokens"""
    init_range: float = Field(default=0.08, ge=0.0, le=10.0)
    """standard deviation of the initial weights"""
    vocab_size: int = Field(default=512, ge=2, le=500_000)
    """vocabulary size of the byte-level BPE tokenizer; includes tokens for the game's own
    phrases"""
    tokenizer_games: int = Field(default=500, ge=1, le=100_000)
    """scripted games whose text trains the tokenizer"""
    split_lines: bool = False
    """encode a proposal line, such as "column: row", as two tokens instead of one if the game's
    texts are short; small models then see which row of a large table is taken"""

    @model_validator(mode="after")
    def check(self) -> Self:
        step = 2 * self.heads  # RoPE rotates pairs of a head's dimensions
        if self.width % step:
            raise ValueError(
                f"model.scratch.width must be an even multiple of heads ({self.heads}), got "
                f"{self.width}; the nearest is {max(1, round(self.width / step)) * step}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.scratch.kv_heads must divide heads ({self.heads}), got {self.kv_heads}"
            )
        return self


@dataclass(frozen=True, slots=True, config=RULES)
class LoraConfig:
    """Low-rank adapters (LoRA); self-play trains them and keeps the base weights fixed."""

    rank: int = Field(default=16, ge=1, le=4_096)
    """rank of the adapters"""
    alpha: int = Field(default=32, ge=1, le=65_536)
    """an adapter's output is scaled by alpha / rank"""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )
    """linear layers of each block that have an adapter; model.lora=null trains all weights"""


@dataclass(frozen=True, slots=True, config=RULES)
class ModelConfig:
    """The policy: a pretrained model or a model with random initial weights."""

    path: str | None = None
    """Hugging Face id, local folder or .gguf file; null with model.scratch"""
    scratch: ScratchConfig | None = None
    """architecture of a model with random initial weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """compute dtype"""
    chat_template: dict[str, object] = Field(default_factory=dict)
    """extra arguments for the chat template, such as enable_thinking"""
    lora: LoraConfig | None = None
    """LoRA adapters; null trains all weights"""
    liger: bool = True
    """use Liger's fused RMSNorm, RoPE and SwiGLU kernels if a GPU and the package are
    available"""


@dataclass(frozen=True, slots=True, config=RULES)
class EngineConfig:
    """The inference engine that generates the policy's turns. Each kind adds its own settings: see
    `selfplay/engines/options.py` for the built-in kinds."""

    kind: Annotated[str, function_for("engine.kind")] = "hf"
    """hf generates with transformers in the trainer's process; sglang starts SGLang, vllm vLLM; or
    your own class as my_file.py:Name"""
    max_batch: int = Field(default=512, ge=1, le=65_536)
    """most concurrent games and prompts of the hf engine; most concurrent requests of the others"""
    tp_size: int = Field(default=1, ge=1, le=1_024)
    """tensor-parallel size of SGLang: number of adjacent ranks that share one engine"""
    timeout_s: float = Field(default=600.0, ge=1.0, le=86400.0)
    """seconds to wait for the engine's answer to a generation or weight-sync request before the
    engine is restarted"""
    max_mismatch: float = Field(default=0.05, ge=0.0, le=1000.0)
    """largest mean log-prob mismatch |engine - trainer| over the games of a step, in nats per
    token; if it is above this and above the noise measured at the start and in play, the run
    saves its state and stops"""

    @property
    def copies(self) -> int:
        """The number of engines on one GPU, each with a copy of the weights."""
        return 1

    @property
    def kernels(self) -> str:
        """The module of the engine's kernels, if the trainer uses them for bit-equal log-probs; ""
        for the trainer's own kernels."""
        return ""

    @property
    def device_map(self) -> Literal["auto"] | None:
        """How the model is split over devices outside of training; None: it is on one device."""
        return None


@dataclass(frozen=True, slots=True, config=RULES)
class ParallelConfig:
    """How the update is distributed; tp * fsdp must equal the number of ranks."""

    tp: int = Field(default=1, ge=1, le=1_024)
    """tensor-parallel size of the trainer: ranks that split each layer"""
    fsdp: int | None = Field(default=None, ge=1, le=65_536)
    """FSDP size: ranks that shard parameters and split the batch; null is all ranks divided by
    tp"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """what is in host memory during the rollout, in addition to the reference model: the optimizer
    state, or all, which includes the master weights; with all, the log-probs of engine and trainer
    are compared only in the update"""
    checkpointing: Literal["none", "half", "full"] = "none"
    """activation checkpointing: full recomputes each layer's activations in the backward
    pass, half every second layer's"""
