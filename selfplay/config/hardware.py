"""Settings of the model and the machine: the policy, the engine, the ranks, the logs."""

from __future__ import annotations

from dataclasses import dataclass

from selfplay.config.settings import key, section

MAX_PARAMETERS = 10_000_000_000  # of a model from scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchConfig:
    """A model built from scratch with random weights, and its byte-level BPE tokenizer."""

    arch: str = key("qwen2", "layer style", choices=("qwen2", "llama"))
    width: int = key(96, "hidden size", low=8, high=32_768)
    layers: int = key(3, "number of layers", low=1, high=256)
    heads: int = key(4, "attention heads; the width is an even multiple", low=1, high=1_024)
    kv_heads: int = key(4, "key-value heads; must divide the heads", low=1, high=1_024)
    mlp_width: int = key(256, "hidden size of the feed-forward block", low=8, high=131_072)
    max_positions: int = key(1024, "longest transcript the model can read", low=16, high=1_000_000)
    tie_embeddings: bool = key(True, "output layer shares the embedding matrix")
    init_range: float = key(0.08, "standard deviation of initial weights", low=0.0, high=10.0)
    rope_theta: float = key(
        10_000.0, "base of the rotary position frequencies", low=1.0, high=1000000000.0
    )
    vocab_size: int = key(
        512,
        "tokens of the byte-level BPE tokenizer, the game's phrases included",
        low=260,
        high=500_000,
    )
    tokenizer_games: int = key(
        500, "scripted games whose text trains the tokenizer", low=1, high=100_000
    )
    split_lines: bool = key(
        False,
        "a brief proposal's line is two tokens, its paper and its reviewer, and not one for each "
        "pair of them; on large boards that tells a small model who is taken",
    )

    def check(self) -> None:
        step = 2 * self.heads  # rotary positions turn the numbers of a head in pairs
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, which self-play trains in place of the weights."""

    rank: int = key(16, "inner width of an adapter", low=1, high=4_096)
    alpha: int = key(32, "an adapter's output is multiplied by alpha over rank", low=1, high=65_536)
    dropout: float = key(0.0, "share of an adapter's inputs dropped in updates", low=0.0, high=0.9)
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "linear layers of each block that get an adapter",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face id or folder, or a from-scratch shape."""

    path: str | None = key(None, "Hugging Face id or folder; leave empty for a scratch model")
    scratch: ScratchConfig | None = section(
        ScratchConfig, "shape of a from-scratch model", optional=True
    )
    dtype: str = key("float32", "compute precision", choices=("float32", "bfloat16"))
    chat_template: dict[str, object] = key(
        {}, "arguments given to the chat template, such as enable_thinking"
    )
    lora: LoraConfig | None = section(
        LoraConfig, "adapters; empty trains all weights", optional=True
    )
    liger: bool = key(
        True, "liger's fused RMSNorm, RoPE and SwiGLU, where a GPU and the package are there"
    )

    def check(self) -> None:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("model needs exactly one of model.path and model.scratch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What generates the turns."""

    kind: str = key("hf", "transformers in this process, or SGLang", choices=("hf", "sglang"))
    max_batch: int = key(512, "prompts the hf engine generates at once", low=1, high=65_536)
    mem_fraction: float = key(
        0.7, "share of free GPU memory the SGLang engine takes", low=0.05, high=0.95
    )
    tp_size: int = key(
        1, "neighbouring ranks that share one engine (SGLang's tensor parallel)", low=1, high=1_024
    )
    attention: str = key(
        "auto", "SGLang attention backend", choices=("auto", "fa3", "flashinfer", "triton")
    )
    max_cache_tokens: int = key(
        0,
        "tokens of the SGLang cache; 0 takes what the memory fraction leaves",
        low=0,
        high=1_000_000_000,
    )
    deterministic: bool = key(
        False, "SGLang's batch-invariant kernels with one seed a request; slower"
    )
    timeout_s: float = key(
        600.0, "longest wait for one turn or push before the run stops", low=1.0, high=86400.0
    )
    max_mismatch: float = key(
        0.05,
        "the run saves and stops when engine and trainer log-probs differ by more nats a token, on "
        "average over a step's games",
        low=0.0,
        high=1000.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the update is spread over ranks; tp times fsdp must be the number of ranks."""

    tp: int = key(1, "ranks that split each layer (tensor parallel)", low=1, high=1_024)
    fsdp: int | None = key(
        None,
        "ranks that shard parameters and data; empty means all ranks over tp",
        low=1,
        high=65_536,
    )
    offload_optimizer: bool = key(False, "optimizer state waits in host memory during play")
    offload_parameters: bool = key(
        False,
        "master weights wait in host memory during play; log-probs are then compared in the update "
        "alone",
    )
    offload_reference: bool = key(True, "the reference waits in host memory during play")
    checkpointing: str = key(
        "none", "activations recomputed in the backward pass", choices=("none", "full")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, only when asked for."""

    mode: str = key("off", "off, online or offline", choices=("off", "online", "offline"))
    project: str = key("selfplay", "project name")
