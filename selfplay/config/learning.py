"""Settings of the warm start, the algorithm, PPO's critic and the optimizer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.schema import RULES, key

# Methods whose baseline is of the sample's own group. Their groups need two members, and those with
# zero variance have no gradient and are dropped. Other methods keep them, because a group can
# differ from the batch or the moving average.
COMPARED_IN_GROUPS = ("grpo", "dr_grpo", "rloo")


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class WarmStartConfig:
    """Supervised imitation of scripted players and of people before self-play."""

    num_games: int = key(
        0,
        "scripted games to imitate; 0 without recorded games skips the warm start",
        within=(0, 10_000_000),
    )
    teachers: tuple[str, ...] = key(
        ("honest",),
        "scripted players as 'name:option=value*weight'; each seat samples one by weight",
    )
    first_games: int = key(
        0,
        "how many of num_games first_teachers play; all passes over these games come before the "
        "other games, as a first lesson on a simpler game",
        within=(0, 10_000_000),
    )
    first_teachers: tuple[str, ...] = key((), "the teachers of the first games")
    recorded: str | None = key(
        None,
        "a .jsonl of recorded human games to imitate as well, both seats of each; evaluations "
        "leave out the boards that were imitated (docs/real_models.md)",
    )
    recorded_share: float = key(
        0.5,
        "share of the recorded boards that are imitated, selected by a board's digest; the others "
        "can be used for evaluation",
        within=(0.01, 1.0),
    )
    recorded_repeats: int = key(
        1,
        "how often each pass contains each recorded game; it contains a scripted game once",
        within=(1, 1_000),
    )
    batch_size: int = key(16, "transcripts per optimizer step", within=(1, 100_000))
    epochs: int = key(1, "passes over the scripted games", within=(1, 1_000))
    optimizer: Literal["adamw", "muon"] = key(
        "adamw",
        "muon: orthogonal steps for the matrices inside the model, which learn faster from random "
        "weights; AdamW for the rest",
    )
    lr: float = key(1e-3, "peak learning rate", within=(0.0, 10.0))
    warmup_steps: int = key(
        50, "optimizer steps of linear learning-rate warm-up", within=(0, 10_000_000)
    )
    auxiliary_weight: float = key(
        0.0,
        "weight of the auxiliary imitation loss on new scripted games in each self-play "
        "update; 0 turns it off",
        within=(0.0, 1000.0),
    )
    keep: Literal["same", "all"] = key(
        "same",
        "instances that the teachers play: same applies the game's own filter, all keeps every "
        "instance (much faster to generate where the filter keeps few)",
    )
    auxiliary_games: int = key(
        8,
        "scripted games per step for the auxiliary imitation loss",
        within=(1, 100_000),
    )

    @property
    def imitates(self) -> bool:
        """Whether there is a warm start."""
        return self.num_games > 0 or self.recorded is not None

    @model_validator(mode="after")
    def check(self) -> Self:
        if (self.first_games > 0) != bool(self.first_teachers):
            raise ValueError(
                "warm_start.first_teachers and warm_start.first_games must be set together, "
                f"got {list(self.first_teachers)} with {self.first_games} first games"
            )
        if self.first_games > self.num_games:
            raise ValueError(
                "warm_start.first_games must be at most warm_start.num_games, "
                f"{self.num_games}, got {self.first_games}"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class AlgorithmConfig:
    """How rewards become advantages, and advantages a loss."""

    method: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "ema", "ppo"] = key(
        "grpo",
        "advantage estimator: grpo (group mean and standard deviation), dr_grpo (group mean), "
        "rloo (mean of the other group members), reinforce_pp (batch mean and standard "
        "deviation), ema (moving average for each role), ppo (critic and GAE)",
    )
    advantage_eps: float = key(
        1e-4,
        "added to the standard deviation that divides advantages; a larger value damps groups "
        "with almost no variance",
        within=(0.0, 1000.0),
    )
    error_credit: Literal["episode", "turn"] = key(
        "episode",
        "which tokens get reward.error_penalty: all of the seat's tokens in the episode, or "
        "only those of the refused turn",
    )
    resample: int = key(
        0,
        "replacement instances that a step may draw for instances whose groups all had zero "
        "variance (dynamic sampling); 0 draws none",
        within=(0, 100_000),
    )
    old_logprobs: Literal["engine", "recomputed"] = key(
        "engine",
        "log-probs of the old policy in the ratio: the engine's, or recomputed by the trainer "
        "before the update",
    )
    importance: Literal["none", "token", "sequence"] = key(
        "none",
        "weight the loss by the importance ratio trainer / engine to correct the log-prob "
        "mismatch (needs recomputed old_logprobs): off, per token, or per sequence",
    )
    importance_cap: float = key(
        2.0, "importance ratios are truncated at this value", within=(0.01, 1e6)
    )
    loss: Literal["clip", "gspo", "cispo", "reinforce"] = key(
        "clip",
        "policy loss: clip (PPO's clipped token ratios), gspo (clipped sequence ratios), "
        "cispo (clipped ratios as constant weights), reinforce (no ratios)",
    )
    clip_low: float = key(
        0.2, "lower clip range: ratios are clipped below at 1 - clip_low", within=(0.0, 1.0)
    )
    clip_high: float = key(
        0.2, "upper clip range: ratios are clipped above at 1 + clip_high", within=(0.0, 1e6)
    )
    dual_clip: float = key(
        0.0,
        "bound c > 1 on the ratio of tokens with a negative advantage (dual-clip PPO; losses "
        "clip and gspo); 0 turns it off",
        within=(0.0, 1e6),
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = key(
        "token_mean",
        "token_mean: mean over all tokens; sequence_mean: mean over sequences of each "
        "sequence's token mean; constant: mean over sequences of each one's token sum / "
        "constant_length",
    )
    constant_length: int = key(
        0,
        "divisor in tokens for aggregation constant, whatever the sequence's length",
        within=(0, 10_000_000),
    )
    entropy: float = key(0.0, "coefficient of the entropy bonus", within=(0.0, 1000.0))
    kl: float = key(
        0.0,
        "coefficient of the KL penalty to the reference policy; 0 loads no reference",
        within=(0.0, 1000.0),
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        "KL estimator: k3, k2, or k1, which needs kl_ratio",
    )
    kl_ratio: bool = key(
        False,
        "multiply the KL term by the token's ratio, which makes its gradient unbiased",
    )
    minibatches: int = key(
        1, "minibatches, each one optimizer step, that a rollout is split into", within=(1, 10_000)
    )
    epochs: int = key(1, "passes over each rollout", within=(1, 1_000_000))

    @model_validator(mode="after")
    def check(self) -> Self:
        self._check_loss()
        self._check_kl()
        self._check_importance()
        return self

    def _check_loss(self) -> None:
        if self.dual_clip and (self.dual_clip <= 1 or self.loss not in ("clip", "gspo")):
            raise ValueError(
                "algorithm.dual_clip must be above 1 with algorithm.loss clip or gspo, else 0, got "
                f"{self.dual_clip:g} with {self.loss}"
            )
        if (self.aggregation == "constant") != (self.constant_length > 0):
            raise ValueError(
                "algorithm.constant_length must be at least 1 with algorithm.aggregation constant, "
                f"else 0, got {self.constant_length} with {self.aggregation}"
            )

    def _check_kl(self) -> None:
        if self.kl_estimator == "k1" and not self.kl_ratio:
            raise ValueError(
                "algorithm.kl_estimator must be k3 or k2 with algorithm.kl_ratio false, got k1, "
                "whose gradient is 0 on average; or set algorithm.kl_ratio true"
            )

    def _check_importance(self) -> None:
        if self.importance == "none":
            if self.importance_cap != 2.0:
                raise ValueError(
                    "algorithm.importance_cap needs algorithm.importance token or sequence, got "
                    "none"
                )
            return
        if self.old_logprobs != "recomputed":
            raise ValueError(
                "algorithm.importance needs algorithm.old_logprobs recomputed, got "
                f"{self.old_logprobs}: with engine log-probs the ratio corrects the mismatch"
            )


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class CriticConfig:
    """PPO's value function, and the advantages computed from it."""

    kind: Literal["head", "shared_head", "model"] = key(
        "head",
        "head: a linear head on the policy's last hidden state, without gradient into the "
        "policy; shared_head: the same head with that gradient; model: a second model with a "
        "head, initialised from the policy's weights",
    )
    lam: float = key(
        0.95,
        "GAE's lambda: 0 relies on the critic (one-step TD), 1 on the observed return",
        within=(0.0, 1.0),
    )
    clip: float = key(
        0.2,
        "value clip range: largest change of a value within one rollout; 0 turns clipping off",
        within=(0.0, 1e6),
    )
    lr: float = key(1e-4, "constant learning rate of the critic's own AdamW", within=(0.0, 10.0))
    warmup_steps: int = key(
        0, "self-play steps at the start that train only the critic", within=(0, 10_000_000)
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(
        1e-6,
        "peak learning rate of self-play; adapters (model.lora) on a pretrained model take about "
        "ten times the rate of full training, 1e-5 to 5e-5",
        within=(0.0, 10.0),
    )
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "learning-rate schedule after the warm-up",
    )
    final_share: float = key(
        0.0,
        "final learning rate of linear and cosine, as a fraction of the peak",
        within=(0.0, 1.0),
    )
    warmup_steps: int = key(
        0, "self-play steps of linear learning-rate warm-up", within=(0, 10_000_000)
    )
    master_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "dtype of the master weights; bfloat16 uses stochastic rounding and keeps the moments "
        "in float32",
    )
    max_grad_norm: float = key(
        1.0,
        "gradient clipping: largest global gradient norm; 0 turns it off",
        within=(0.0, 1e9),
    )
    tokens_per_microbatch: int = key(
        16_384, "packed tokens per forward and backward pass", within=(16, 10_000_000)
    )
    share_prefixes: bool = key(
        True, "compute a prefix that samples share, such as the prompt of a group, once"
    )
