"""Settings of the algorithm and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.plugins import PLUGINS, function_for
from selfplay.config.schema import RULES

# Estimators with the baseline of the sample's own group. Their groups need two members, and
# zero-variance groups have no gradient and are dropped. Other estimators keep these groups, which
# can differ from the batch or the moving average.
COMPARED_IN_GROUPS = ("grpo", "dr_grpo", "rloo", "turns")
Aggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True, slots=True, config=RULES)
class AlgorithmConfig:
    """How rewards become advantages, and advantages a loss."""

    advantage: Annotated[str, function_for("algorithm.advantage")] = "grpo"
    """advantage estimator: grpo (group mean and standard deviation), dr_grpo (group mean), rloo
    (mean of the other group members), turns (for each turn the others' mean at this turn),
    reinforce_pp (batch mean and standard deviation), ema (moving average for each seat), ppo
    (critic and GAE, with methods.ppo), or your own function as my_file.py:name
    (docs/your_method.md)"""
    advantage_eps: float = Field(default=1e-4, ge=0.0, le=1000.0)
    """added to the standard deviation that divides advantages; a larger value damps groups with
    almost no variance"""
    loss: Annotated[str, function_for("algorithm.loss")] = "clip"
    """policy loss: clip (PPO's clipped token ratios), gspo (clipped sequence ratios), cispo
    (clipped ratios as constant weights), reinforce (no ratios), or your own function as
    my_file.py:name (docs/your_method.md)"""
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """lower clip range: ratios are clipped below at 1 - clip_low"""
    clip_high: float = Field(default=0.2, ge=0.0, le=1e6)
    """upper clip range: ratios are clipped above at 1 + clip_high"""
    dual_clip: float = Field(default=0.0, ge=0.0, le=1e6)
    """bound c > 1 on the ratio of tokens with a negative advantage (dual-clip PPO; losses clip
    and gspo); 0 turns it off"""
    aggregation: Annotated[int, Field(ge=1, le=10_000_000)] | Aggregation = "token_mean"
    """token_mean: mean over all tokens; sequence_mean: mean over sequences of each sequence's
    token mean; a number of tokens: mean over sequences of each one's token sum divided by this
    number"""
    entropy: float = Field(default=0.0, ge=0.0, le=1000.0)
    """coefficient of the entropy bonus"""
    kl: float = Field(default=0.0, ge=0.0, le=1000.0)
    """coefficient of the KL penalty to the reference policy; 0 loads no reference"""
    kl_estimator: Literal["k3", "k2", "k3_ratio", "k2_ratio", "k1_ratio"] = "k3"
    """KL estimator; with _ratio the KL term is multiplied by the token's ratio, which makes its
    gradient unbiased (docs/kl.md)"""
    minibatches: int = Field(default=1, ge=1, le=10_000)
    """minibatches that a rollout is split into, one optimizer step each"""
    epochs: int = Field(default=1, ge=1, le=1_000_000)
    """passes over each rollout"""
    options: dict[str, object] = Field(default_factory=dict)
    """settings of your own loss or advantage, which reads them as algorithm.options[NAME]"""

    @property
    def groups(self) -> bool:
        """Whether samples are compared within their groups, as a custom function may do."""
        built_in = PLUGINS["algorithm.advantage"].built_in
        return self.advantage in COMPARED_IN_GROUPS or self.advantage not in built_in

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.dual_clip and (self.dual_clip <= 1 or self.loss not in ("clip", "gspo")):
            raise ValueError(
                "algorithm.dual_clip must be above 1 with algorithm.loss clip or gspo, else 0, got "
                f"{self.dual_clip:g} with {self.loss}"
            )
        return self


@dataclass(frozen=True, slots=True, config=RULES)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, ge=0.0, le=10.0)
    """peak learning rate of self-play; adapters (model.lora) on a pretrained model take about
    ten times the rate of full training, 1e-5 to 5e-5"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning-rate schedule after the warm-up"""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """final learning rate of linear and cosine, as a fraction of the peak"""
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    """self-play steps of linear learning-rate warm-up"""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the master weights; bfloat16 uses stochastic rounding and keeps the moments in
    float32"""
    max_grad_norm: float = Field(default=1.0, ge=0.0, le=1e9)
    """gradient clipping: largest global gradient norm; 0 turns it off"""
    tokens_per_microbatch: int = Field(default=16_384, ge=16, le=10_000_000)
    """packed tokens per forward and backward pass"""
    share_prefixes: bool = True
    """compute a prefix that samples share, such as a group's prompt, only once"""
