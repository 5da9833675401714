"""Settings of the learning: imitation before self-play, credit, loss, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from selfplay.config.settings import key


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Imitation of scripted players before self-play, with the same transcripts and update."""

    num_games: int = key(
        0, "scripted games to imitate; 0 skips the warm start", low=0, high=10_000_000
    )
    teachers: tuple[str, ...] = key(
        ("honest",), "scripted players as 'name:option=value*weight'; a seat draws one"
    )
    batch_size: int = key(16, "transcripts an optimizer step", low=1, high=100_000)
    epochs: int = key(1, "passes over the games", low=1, high=1_000)
    lr: float = key(1e-3, "peak learning rate", low=0.0, high=10.0)
    warmup_steps: int = key(50, "optimizer steps of linear warm-up", low=0, high=10_000_000)
    auxiliary_weight: float = key(
        0.0,
        "weight of imitation loss on fresh scripted games mixed into each self-play update",
        low=0.0,
        high=1000.0,
    )
    keep: str = key(
        "same",
        "instances the teachers play: as game.keep says, or all (much faster to generate at 8x8)",
        choices=("same", "all"),
    )
    auxiliary_games: int = key(8, "scripted games of each replay", low=1, high=100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient."""

    method: str = key(
        "grpo",
        "what a reward is compared with: group mean and deviation, group mean, the others' mean, "
        "the batch's mean and deviation, a moving average of each seat, a critic's values",
        choices=("grpo", "dr_grpo", "rloo", "reinforce_pp", "ema", "ppo"),
    )
    advantage_eps: float = key(
        1e-4,
        "added to the standard deviation; larger damps nearly flat groups",
        low=0.0,
        high=1000.0,
    )
    ema_decay: float = key(
        0.8, "what a step leaves of ema's moving average; near 1 it lags", low=0.0, high=0.999
    )
    error_credit: str = key(
        "episode",
        "what reward.error_penalty falls on: every token of the seat, or the refused turn's alone",
        choices=("episode", "turn"),
    )
    resample: int = key(
        0,
        "instances a step may draw in place of those whose groups were all flat",
        low=0,
        high=100_000,
    )
    old_logprobs: str = key("engine", "denominator of the ratio", choices=("engine", "recomputed"))
    importance: str = key(
        "none",
        "weigh a token's loss by trainer over engine (needs recomputed log-probs): not at all, by "
        "its own ratio, or by its sequence's",
        choices=("none", "token", "sequence"),
    )
    importance_cap: float = key(
        2.0, "importance is cut down to this; 0 leaves it", low=0.0, high=1e6
    )
    importance_low: float = key(
        0.0, "importance below this becomes 0: rejected", low=0.0, high=1e12
    )
    importance_high: float = key(
        0.0, "importance above this becomes 0: rejected; 0 rejects none", low=0.0, high=1e6
    )
    loss: str = key(
        "clip",
        "clipped ratios of tokens, or of sequences (gspo); clipped weights (cispo); softly gated "
        "ratios (sapo); soft weights of sequences (vespo); no ratios (reinforce)",
        choices=("clip", "gspo", "cispo", "sapo", "vespo", "reinforce"),
    )
    sapo_temperatures: tuple[float, ...] = key(
        (1.0, 1.05),
        "how fast sapo's gate closes, for positive and for other advantages",
        low=0.01,
        high=1000.0,
    )
    vespo_positive: tuple[float, ...] = key(
        (2.0, 3.0),
        "power and decay of vespo's weight for advantages from 0 on",
        low=0.0,
        high=1000.0,
    )
    vespo_negative: tuple[float, ...] = key(
        (3.0, 2.0),
        "power and decay of vespo's weight for negative advantages",
        low=0.0,
        high=1000.0,
    )
    clip_low: float = key(0.2, "the ratio is clipped below at 1 minus this", low=0.0, high=1.0)
    clip_high: float = key(0.2, "the ratio is clipped above at 1 plus this", low=0.0, high=1e9)
    dual_clip: float = key(
        0.0,
        "a negative advantage counts at most this often (clip, gspo); 0 leaves it out",
        low=0.0,
        high=1e6,
    )
    aggregation: str = key(
        "token_mean",
        "mean over all tokens; over sequences of each one's mean; sum over constant_length, a "
        "sequence",
        choices=("token_mean", "sequence_mean", "constant"),
    )
    constant_length: int = key(
        0, "tokens that constant divides by, whatever was said", low=0, high=10_000_000
    )
    entropy: float = key(
        0.0, "weight of the entropy that is added to the objective", low=0.0, high=1000.0
    )
    kl: float = key(
        0.0,
        "weight of the divergence from the reference; 0 keeps no reference",
        low=0.0,
        high=1000.0,
    )
    kl_estimator: str = key(
        "k3", "in the loss k3 or k2, in the reward k1", choices=("k1", "k2", "k3")
    )
    kl_in: str = key("loss", "where the divergence is charged", choices=("loss", "reward"))
    kl_ratio: bool = key(
        False, "multiply the loss's divergence by the token's ratio, which makes its gradient exact"
    )
    kl_target: float = key(
        0.0,
        "nats a token that the weight kl is steered to; 0 keeps the weight",
        low=0.0,
        high=1000.0,
    )
    kl_horizon: float = key(
        10.0,
        "steps in which a miss of the target by 20 % and more moves kl by 20 %",
        low=1.0,
        high=1e6,
    )
    reference_every: int = key(
        0,
        "steps after which the reference becomes the policy of the moment; 0 never",
        low=0,
        high=10_000_000,
    )
    minibatches: int = key(1, "optimizer steps a rollout is split into", low=1, high=10_000)
    epochs: int = key(1, "passes over a rollout", low=1, high=1_000_000)

    def check(self) -> None:
        self._check_loss()
        self._check_kl()
        self._check_importance()

    def _check_loss(self) -> None:
        if self.dual_clip and (self.dual_clip <= 1 or self.loss not in ("clip", "gspo")):
            raise ValueError(
                "algorithm.dual_clip must be above 1 with algorithm.loss clip or gspo, else 0, got "
                f"{self.dual_clip:g} with {self.loss}"
            )
        for name in ("sapo_temperatures", "vespo_positive", "vespo_negative"):
            if len(getattr(self, name)) != 2:
                raise ValueError(
                    f"algorithm.{name} must be two numbers, got {len(getattr(self, name))}"
                )
        if (self.aggregation == "constant") != (self.constant_length > 0):
            raise ValueError(
                "algorithm.constant_length must be at least 1 with algorithm.aggregation constant, "
                f"else 0, got {self.constant_length} with {self.aggregation}"
            )

    def _check_kl(self) -> None:
        if self.kl == 0 and (self.kl_target or self.reference_every or self.kl_in == "reward"):
            raise ValueError(
                "algorithm.kl must be above 0 where algorithm.kl_target, reference_every or "
                "kl_in reward is set, got 0; 0.01 is a usual start"
            )
        if self.kl_in == "reward" and (self.kl_estimator != "k1" or self.kl_ratio):
            raise ValueError(
                "algorithm.kl_estimator must be k1 and kl_ratio false with algorithm.kl_in reward, "
                f"got {self.kl_estimator} and {str(self.kl_ratio).lower()}: k2 and k3 as rewards "
                "hardly pull at all (docs/methods.md)"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_ratio:
            raise ValueError(
                "algorithm.kl_estimator must be k3 or k2 with algorithm.kl_in loss, got k1, whose "
                "gradient is 0 on average; algorithm.kl_ratio true makes it exact"
            )

    def _check_importance(self) -> None:
        if self.importance == "none":
            if (self.importance_cap, self.importance_low, self.importance_high) != (2.0, 0.0, 0.0):
                raise ValueError(
                    "algorithm.importance_cap, _low and _high need algorithm.importance token or "
                    "sequence, got none"
                )
            return
        if self.old_logprobs != "recomputed":
            raise ValueError(
                "algorithm.importance needs algorithm.old_logprobs recomputed, got "
                f"{self.old_logprobs}: with the engine's the ratio itself holds the correction"
            )
        if self.loss == "vespo":
            raise ValueError(
                f"algorithm.importance must be none with algorithm.loss vespo, got "
                f"{self.importance}: with old_logprobs engine its own weight holds the correction"
            )
        if self.importance_cap == 0 and self.importance_high == 0:
            raise ValueError(
                "algorithm.importance_cap or importance_high must be above 0, got 0 and 0: a "
                "weight without bound lets one token outweigh the batch"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """PPO's critic, and the advantages that its values give."""

    kind: str = key(
        "head",
        "a linear head on the policy's last hidden state, which the value loss leaves alone (head) "
        "or trains (shared_head), or a second model from the same weights with a head (model)",
        choices=("head", "shared_head", "model"),
    )
    gamma: float = key(1.0, "discount from one trained token to the next", low=0.0, high=1.0)
    lam: float = key(
        0.95,
        "decay of later errors in an advantage: 0 trusts the values, 1 the rewards alone",
        low=0.0,
        high=1.0,
    )
    whiten: bool = key(True, "advantages get mean 0 and variance 1 over all ranks' trained tokens")
    clip: float = key(
        0.2,
        "a value moves at most this far from its old one in a rollout; 0 lets it",
        low=0.0,
        high=1e6,
    )
    coefficient: float = key(0.5, "weight of the value loss", low=0.0, high=1000.0)
    lr: float = key(1e-4, "learning rate of the critic's own AdamW; constant", low=0.0, high=10.0)
    warmup_steps: int = key(
        0, "self-play steps in which only the critic learns", low=0, high=10_000_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = key(1e-6, "peak learning rate of self-play", low=0.0, high=10.0)
    schedule: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    final_share: float = key(
        0.0, "linear and cosine end at this share of the peak", low=0.0, high=1.0
    )
    warmup_steps: int = key(0, "self-play steps of linear warm-up", low=0, high=10_000_000)
    betas: tuple[float, ...] = key(
        (0.9, 0.95), "AdamW's decay rates of the two moments", low=0.0, high=0.999999
    )
    weight_decay: float = key(0.0, "AdamW's weight decay on matrices", low=0.0, high=1000.0)
    master_dtype: str = key(
        "float32",
        "dtype of the weights that are updated; bfloat16 is rounded stochastically and keeps its "
        "moments in float32",
        choices=("float32", "bfloat16"),
    )
    max_grad_norm: float = key(1.0, "gradients are scaled down to this norm", low=0.0, high=1e9)
    tokens_per_microbatch: int = key(
        16_384, "packed tokens a forward and backward pass", low=16, high=10_000_000
    )

    def check(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(
                f"optim.betas must be two numbers, got {list(self.betas)}; nearest: [0.9, 0.95]"
            )
