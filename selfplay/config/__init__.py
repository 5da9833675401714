"""Every setting of a run: one default and one sentence each. YAML holds only what differs.

Lengths are in tokens, times in seconds. Nothing here reads the environment or knows torch. `play`
holds the games' sections, `partners` those of who sits beside the policy, `learn` the algorithm's,
`machine` the model's, engine's and ranks'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfplay.config.collab import CollabConfig
from selfplay.config.hardware import (
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    ScratchConfig,
    WandbConfig,
)
from selfplay.config.learning import AlgorithmConfig, CriticConfig, OptimConfig, WarmStartConfig
from selfplay.config.partners import DriftMonitorConfig, EndpointConfig, PolicyPoolConfig
from selfplay.config.play import (
    BranchConfig,
    DataConfig,
    EvalConfig,
    GameConfig,
    RewardConfig,
    RolloutConfig,
    StageConfig,
)
from selfplay.config.player_spec import POOL, SELF, parse_shares
from selfplay.config.settings import key, load, section

__all__ = [
    "AlgorithmConfig",
    "BranchConfig",
    "CollabConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DriftMonitorConfig",
    "EndpointConfig",
    "EngineConfig",
    "EvalConfig",
    "GameConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PolicyPoolConfig",
    "RewardConfig",
    "RolloutConfig",
    "ScratchConfig",
    "StageConfig",
    "WandbConfig",
    "WarmStartConfig",
    "load_config",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run."""

    out: str = key("runs/default", "run folder; starting again in it resumes")
    seed: int = key(0, "seed of every named draw", low=0, high=1_000_000_000)
    steps: int = key(100, "self-play steps", low=0, high=10_000_000)
    save_every: int = key(
        50, "steps between checkpoints; the last step is always saved", low=1, high=10_000_000
    )
    keep_checkpoints: int = key(2, "newest checkpoints kept", low=1, high=10_000)
    log_games_every: int = key(
        50, "every n-th game is written in full to games.jsonl", low=1, high=10_000_000
    )
    threads: int = key(0, "CPU threads of torch; 0 leaves its default", low=0, high=256)
    device: str = key("auto", "auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"))
    game: GameConfig = section(GameConfig, "the game")
    data: DataConfig = section(DataConfig, "instances")
    model: ModelConfig = section(ModelConfig, "the policy")
    warm_start: WarmStartConfig = section(WarmStartConfig, "imitation before self-play")
    rollout: RolloutConfig = section(RolloutConfig, "play")
    policy_pool: PolicyPoolConfig = section(PolicyPoolConfig, "the partner pool")
    endpoint: EndpointConfig = section(EndpointConfig, "partners behind an address")
    reward: RewardConfig = section(RewardConfig, "reward")
    algorithm: AlgorithmConfig = section(
        AlgorithmConfig, "credit and loss; `algorithm: rloo` names the method alone", short="method"
    )
    critic: CriticConfig = section(CriticConfig, "values and advantages of ppo")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    engine: EngineConfig = section(EngineConfig, "engine")
    parallel: ParallelConfig = section(ParallelConfig, "ranks")
    eval: EvalConfig = section(EvalConfig, "evaluation")
    wandb: WandbConfig = section(WandbConfig, "Weights & Biases")

    def check(self) -> None:
        if self.reward.kind == "collab" and self.game.name != "collab":
            raise ValueError(f"reward.kind collab needs game.name collab, got {self.game.name}")
        if self.game.name == "collab" and not self.game.messages:
            raise ValueError("game.messages must be true in collab, which is nothing but messages")
        if self.game.name == "collab" and self.data.curriculum:
            raise ValueError("data.curriculum needs game.name matching: it is a matter of boards")
        scratch = self.model.scratch
        if scratch and self.rollout.max_game_tokens > scratch.max_positions:
            raise ValueError(
                f"rollout.max_game_tokens must be at most model.scratch.max_positions "
                f"{scratch.max_positions}, got {self.rollout.max_game_tokens}"
            )
        larger = [s.size for s in self.data.curriculum if (s.size or 0) > self.game.size]
        if larger:
            raise ValueError(
                f"data.curriculum sizes must be at most game.size {self.game.size}, which texts "
                f"and limits are made for, got {larger[0]}"
            )
        if self.model.lora is not None:
            self._check_lora(self.model.lora)
        method, size = self.algorithm.method, self.rollout.group_size
        if method == "ppo":
            self._check_critic()
        elif self.critic != CriticConfig():
            raise ValueError(
                f"critic.* is read by algorithm.method ppo alone, got method {method}; "
                "set algorithm.method to ppo or leave critic.* out"
            )
        in_groups = method in ("grpo", "dr_grpo", "rloo")
        forks = self.rollout.branch.turns
        if forks != "none" and not in_groups:
            raise ValueError(
                "algorithm.method must be grpo, dr_grpo or rloo with rollout.branch, which "
                f"compares the turns tried from one state, got {method}"
            )
        if forks == "decisions" and self.game.name == "collab":
            raise ValueError(
                "rollout.branch.turns must not be decisions with game.name collab, in which "
                "nothing lies on the table; nearest: all"
            )
        if size < 2 and in_groups and forks != "all":
            raise ValueError(
                f"rollout.group_size must be at least 2 for {method}, got {size}: nothing stands "
                "beside a single game (reinforce_pp and ema compare over the batch, ppo does not)"
            )
        beside = any(spec.kind != SELF for spec, _ in parse_shares(self.rollout.partners))
        if beside and size < 4 and in_groups:
            raise ValueError(
                f"rollout.group_size must be at least 4 for {method} with another partner than "
                f"self (a group is the games of one seat), got {size}; nearest: 4"
            )
        if self.algorithm.resample and not in_groups:
            raise ValueError(
                f"algorithm.resample must be 0 for {method}, which drops no flat groups, got "
                f"{self.algorithm.resample}"
            )

        self._check_memory()

    def _check_memory(self) -> None:
        if self.optim.master_dtype == "bfloat16" and self.model.dtype != "bfloat16":
            raise ValueError(
                f"model.dtype must be bfloat16 with optim.master_dtype bfloat16, got "
                f"{self.model.dtype}: nothing computes finer than the weights are kept"
            )
        pool = any(spec.kind == POOL for spec, _ in parse_shares(self.rollout.partners))
        if self.parallel.offload_parameters and pool:
            raise ValueError(
                "parallel.offload_parameters must be false with the partner pool, whose snapshots "
                "are taken while the parameters would wait on the host"
            )

    def _check_lora(self, lora: LoraConfig) -> None:
        if self.parallel.tp > 1:
            raise ValueError(
                f"parallel.tp must be 1 with model.lora, got {self.parallel.tp}: adapters are "
                "sharded (parallel.fsdp), not divided"
            )
        if self.algorithm.reference_every:
            raise ValueError(
                "algorithm.reference_every must be 0 with model.lora, got "
                f"{self.algorithm.reference_every}: the reference is the base without adapters"
            )
        if lora.dropout and self.algorithm.old_logprobs != "recomputed":
            raise ValueError(
                "algorithm.old_logprobs must be recomputed with model.lora.dropout above 0, got "
                f"{self.algorithm.old_logprobs}: an update's own log-probs are noisy, so only "
                "those of a pass before it can be compared with the engine's"
            )

    def _check_critic(self) -> None:
        if self.parallel.tp > 1:
            raise ValueError(
                f"parallel.tp must be 1 for algorithm.method ppo, got {self.parallel.tp}: the "
                "critic is sharded (parallel.fsdp), not divided"
            )


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A file's settings under `key=value` overrides. Raises SettingsError with file and line."""
    return load(Config, Path(path) if path else None, overrides)
