"""Every setting of a run: one default and one sentence each. YAML holds only what differs.

Lengths are in tokens, times in seconds. Nothing here reads the environment or knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfplay.settings import key, load, section


@dataclass(frozen=True, slots=True, kw_only=True)
class GameConfig:
    """Which game, which instances, and what a seat may do and see."""

    name: str = key("matching", "game to play", choices=("matching",))
    size: int = key(8, "rows and columns of the board", low=2, high=8)
    p_observed: float = key(0.4, "chance that a seat sees a cell", low=0.0, high=1.0)
    scale: bool = key(True, "each seat's values are multiplied by a private factor from 1 to 10")
    max_value: int = key(100, "cell values are whole numbers below this", low=2)
    hardness: float = key(
        1.25, "a solo plan is weak when its value times this is below the best", low=1.0
    )
    keep: str = key(
        "both",
        "instances kept: both seats' solo plans weak, exactly one weak, or all",
        choices=("both", "exactly_one", "all"),
    )
    messages: bool = key(True, "seats may send messages (false is the no-talk control)")
    brief: bool = key(False, "short texts for small from-scratch models instead of full rules")
    private_reasoning: bool = key(
        False, "text before the tag is allowed and hidden from the partner"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where training instances come from."""

    train: str = key(
        "generated", "'generated' (drawn online, seeded by run and index) or a file of instances"
    )
    processes: int = key(1, "processes that generate instances", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchConfig:
    """A model built from scratch with random weights, and its byte-level BPE tokenizer."""

    arch: str = key("qwen2", "layer style", choices=("qwen2", "llama"))
    width: int = key(96, "hidden size", low=8)
    layers: int = key(3, "number of layers", low=1)
    heads: int = key(4, "attention heads; the width is an even multiple", low=1)
    kv_heads: int = key(4, "key-value heads; must divide the heads", low=1)
    mlp_width: int = key(256, "hidden size of the feed-forward block", low=8)
    max_positions: int = key(1024, "longest transcript the model can read", low=16)
    tie_embeddings: bool = key(True, "output layer shares the embedding matrix")
    init_range: float = key(0.08, "standard deviation of initial weights", low=0.0)
    rope_theta: float = key(10_000.0, "base of the rotary position frequencies", low=1.0)
    vocab_size: int = key(
        512, "tokens of the byte-level BPE tokenizer, the game's phrases included", low=260
    )
    tokenizer_games: int = key(500, "scripted games whose text trains the tokenizer", low=1)

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
    liger: bool = key(
        True, "liger's fused RMSNorm, RoPE and SwiGLU, where a GPU and the package are there"
    )

    def check(self) -> None:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("model needs exactly one of model.path and model.scratch")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Imitation of scripted players before self-play, with the same transcripts and update."""

    num_games: int = key(0, "scripted games to imitate; 0 skips the warm start", low=0)
    teachers: tuple[str, ...] = key(
        ("honest",), "scripted players as 'name:option=value*weight'; a seat draws one"
    )
    batch_size: int = key(16, "transcripts an optimizer step", low=1)
    epochs: int = key(1, "passes over the games", low=1)
    lr: float = key(1e-3, "peak learning rate", low=0.0)
    warmup_steps: int = key(50, "optimizer steps of linear warm-up", low=0)
    replay: float = key(
        0.0,
        "weight of imitation loss on fresh scripted games mixed into each self-play update",
        low=0.0,
    )
    keep: str = key(
        "same",
        "instances the teachers play: as game.keep says, or all (much faster to generate at 8x8)",
        choices=("same", "all"),
    )
    replay_games: int = key(8, "scripted games of each replay", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How the games of a step are played."""

    instances: int = key(16, "instances a step, over all ranks", low=1)
    group_size: int = key(8, "episodes an instance", low=1)
    max_turns: int = key(
        30, "legal moves a game; a game at the limit ends without agreement", low=1
    )
    max_retries: int = key(2, "refused moves a turn before the game ends without agreement", low=0)
    max_new_tokens: int = key(256, "sampled tokens a try at a move", low=1)
    max_game_tokens: int = key(4096, "tokens of one seat's transcript", low=16)
    temperature: float = key(1.0, "sampling temperature; the loss uses the same", low=0.0)
    train_seats: str = key(
        "both", "seats the policy holds: both, or one with a partner", choices=("both", "one")
    )
    partner: str = key("scripted:honest", "who sits in the other seat when the policy holds one")

    def check(self) -> None:
        if self.temperature == 0.0:
            raise ValueError(
                "rollout.temperature must be above 0 in training, got 0.0: "
                "greedy play has no gradient"
            )
        if self.train_seats == "one" and self.group_size % 2:
            raise ValueError(
                f"rollout.group_size must be even when train_seats is one (half the games in "
                f"each seat), got {self.group_size}; nearest: {self.group_size + 1}"
            )
        if self.train_seats == "one" and self.group_size < 4:
            raise ValueError(
                f"rollout.group_size must be at least 4 when train_seats is one (a group is "
                f"the games of one seat), got {self.group_size}; nearest: 4"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """What an episode earns."""

    kind: str = key(
        "score_norm",
        "value over the best possible, or 1 for any agreement",
        choices=("score_norm", "accept"),
    )
    error_penalty: float = key(
        0.0, "subtracted for each refused move of the seat, floor 0", low=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient."""

    advantage_std: bool = key(
        True, "divide a group's advantages by its standard deviation plus advantage_eps"
    )
    advantage_eps: float = key(
        1e-4, "added to the standard deviation; larger damps nearly flat groups", low=0.0
    )
    old_logprobs: str = key("engine", "denominator of the ratio", choices=("engine", "recomputed"))
    clip_low: float = key(0.2, "the ratio is clipped below at 1 minus this", low=0.0, high=1.0)
    clip_high: float = key(0.2, "the ratio is clipped above at 1 plus this", low=0.0)
    kl: float = key(
        0.0, "weight of the k3 divergence from the frozen reference; 0 keeps no reference", low=0.0
    )
    minibatches: int = key(1, "optimizer steps a rollout is split into", low=1)
    epochs: int = key(1, "passes over a rollout", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = key(1e-6, "peak learning rate of self-play", low=0.0)
    schedule: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    final_share: float = key(
        0.0, "linear and cosine end at this share of the peak", low=0.0, high=1.0
    )
    warmup_steps: int = key(0, "self-play steps of linear warm-up", low=0)
    betas: tuple[float, ...] = key((0.9, 0.95), "AdamW's decay rates of the two moments")
    weight_decay: float = key(0.0, "AdamW's weight decay on matrices", low=0.0)
    max_grad_norm: float = key(1.0, "gradients are scaled down to this norm", low=0.0)
    tokens_per_microbatch: int = key(16_384, "packed tokens a forward and backward pass", low=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What generates the turns."""

    kind: str = key("hf", "transformers in this process, or SGLang", choices=("hf", "sglang"))
    max_batch: int = key(512, "prompts the hf engine generates at once", low=1)
    mem_fraction: float = key(
        0.7, "share of free GPU memory the SGLang engine takes", low=0.05, high=0.95
    )
    tp_size: int = key(
        1, "neighbouring ranks that share one engine (SGLang's tensor parallel)", low=1
    )
    attention: str = key(
        "auto", "SGLang attention backend", choices=("auto", "fa3", "flashinfer", "triton")
    )
    max_cache_tokens: int = key(
        0, "tokens of the SGLang cache; 0 takes what the memory fraction leaves", low=0
    )
    deterministic: bool = key(
        False, "SGLang's batch-invariant kernels with one seed a request; slower"
    )
    timeout_s: float = key(600.0, "longest wait for one turn or push before the run stops", low=1.0)
    max_gap: float = key(
        0.05, "the run stops when engine and trainer log-probs differ by more on average", low=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the update is spread over ranks; tp times fsdp must be the number of ranks."""

    tp: int = key(1, "ranks that split each layer (tensor parallel)", low=1)
    fsdp: int | None = key(
        None, "ranks that shard parameters and data; empty means all ranks over tp"
    )
    offload_optimizer: bool = key(False, "optimizer state waits in host memory during play")
    offload_reference: bool = key(True, "the reference waits in host memory during play")
    checkpointing: str = key(
        "none", "activations recomputed in the backward pass", choices=("none", "full")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out games during and after training."""

    every: int = key(
        0, "steps between evaluations; 0 evaluates only before and after self-play", low=0
    )
    num_games: int = key(256, "held-out games of an evaluation during training", low=1)
    final_games: int = key(1024, "held-out games before and after self-play", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, only when asked for."""

    mode: str = key("off", "off, online or offline", choices=("off", "online", "offline"))
    project: str = key("selfplay", "project name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run."""

    out: str = key("runs/default", "run folder; starting again in it resumes")
    seed: int = key(0, "seed of every named draw", low=0)
    steps: int = key(100, "self-play steps", low=0)
    save_every: int = key(50, "steps between checkpoints; the last step is always saved", low=1)
    keep_checkpoints: int = key(2, "newest checkpoints kept", low=1)
    log_games_every: int = key(50, "every n-th game is written in full to games.jsonl", low=1)
    threads: int = key(0, "CPU threads of torch; 0 leaves its default", low=0)
    device: str = key("auto", "auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"))
    game: GameConfig = section(GameConfig, "the game")
    data: DataConfig = section(DataConfig, "instances")
    model: ModelConfig = section(ModelConfig, "the policy")
    warm_start: WarmStartConfig = section(WarmStartConfig, "imitation before self-play")
    rollout: RolloutConfig = section(RolloutConfig, "play")
    reward: RewardConfig = section(RewardConfig, "reward")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "credit and loss")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    engine: EngineConfig = section(EngineConfig, "engine")
    parallel: ParallelConfig = section(ParallelConfig, "ranks")
    eval: EvalConfig = section(EvalConfig, "evaluation")
    wandb: WandbConfig = section(WandbConfig, "Weights & Biases")

    def check(self) -> None:
        scratch = self.model.scratch
        if scratch and self.rollout.max_game_tokens > scratch.max_positions:
            raise ValueError(
                f"rollout.max_game_tokens must be at most model.scratch.max_positions "
                f"{scratch.max_positions}, got {self.rollout.max_game_tokens}"
            )
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size must be at least 2 for grpo, got {self.rollout.group_size}"
            )


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A file's settings under `key=value` overrides. Raises SettingsError with file and line."""
    return load(Config, Path(path) if path else None, overrides)
