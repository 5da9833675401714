"""Settings of the learning: imitation before self-play, credit, loss, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from selfplay.settings import key


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
class AlgorithmConfig:
    """How rewards become a gradient."""

    method: str = key(
        "grpo",
        "what a reward is compared with: group mean and deviation, group mean, the others' mean, "
        "the batch's mean and deviation, a moving average of each seat, a critic's values",
        choices=("grpo", "dr_grpo", "rloo", "reinforce_pp", "ema", "ppo"),
    )
    advantage_eps: float = key(
        1e-4, "added to the standard deviation; larger damps nearly flat groups", low=0.0
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
        0, "instances a step may draw in place of those whose groups were all flat", low=0
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
        0.2, "a value moves at most this far from its old one in a rollout; 0 lets it", low=0.0
    )
    coefficient: float = key(0.5, "weight of the value loss", low=0.0)
    lr: float = key(1e-4, "learning rate of the critic's own AdamW; constant", low=0.0)
    warmup_steps: int = key(0, "self-play steps in which only the critic learns", low=0)


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
