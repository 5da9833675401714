"""PPO: a critic estimates the expected return at each token, and GAE gives the advantages.

The critic estimates a seat's expected return before each token that the seat samples. It is a
second model, initialised with the policy's first weights, with a linear head on the last hidden
state at the position whose next token is sampled. The head starts at zero, so the first values are
0, and computes in fp32 whatever the dtype of the layers.

Shapes: M trained tokens of a micro-batch, K of one sample or of this rank, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from selfplay.advantages.sample import Sample
from selfplay.config import Config
from selfplay.config.plugins import methods_of
from selfplay.distributed import World, all_reduce_sum, as_forward, shard_alone
from selfplay.errors import SettingsError
from selfplay.learner.batch import MicroBatch
from selfplay.learner.learner import Learner, autocast
from selfplay.learner.method import LossTerm, Method, Parts, Trained
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.rescore import at_trained_tokens, token_values
from selfplay.methods.options import PPOOptions
from selfplay.model.policy import hidden_states

VALUE_WEIGHT = 0.5  # of the value loss, relative to the surrogate
WHITE_EPS = 1e-8  # added to the variance, so that equal advantages become 0


class PPO(Method):
    """The critic, its values and its loss."""

    Options = PPOOptions

    def __init__(self, options: PPOOptions, parts: Parts) -> None:
        """The critic starts from the policy's first weights and a zero head; both are sharded like
        the policy, and AdamW trains both at the constant rate `lr`."""
        super().__init__(options, parts)
        config, learner = parts.config, parts.learner
        self.backbone = parts.load()
        width, device = self.backbone.config.hidden_size, learner.world.device
        self.head = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        shard_alone(self.head, learner.world)
        if not self.backbone.config.tie_word_embeddings:
            self.backbone.get_output_embeddings().requires_grad_(False)  # values need no logits
        module = nn.ModuleDict({"head": self.head, "trunk": self.backbone})
        optimizer = make_optimizer(module, config.optim, lr=options.lr)
        self.trained["critic"] = Trained(module, optimizer)
        self.num_steps = 0  # with an update of this policy

    @classmethod
    def ready(cls, options: PPOOptions, config: Config, *, ask: bool) -> None:
        """Raise SettingsError if a later method's loss would train the policy in the warm-up."""
        order, own = [(name, kind) for name, kind, _ in methods_of(config)], ""
        for name, kind in order:
            if own and options.warmup_steps and kind.terms is not Method.terms:
                raise SettingsError(
                    f"methods must have {name} before {own}, or its loss would train the policy in "
                    f"the critic's warm-up, got {', '.join(name for name, _ in order)}"
                )
            own = own or name * (kind is cls)

    def values(self, learner: Learner, batch: MicroBatch) -> Tensor:
        """The critic's values [M], fp32, before each trained token is sampled."""
        with autocast(learner):
            hidden_MD = hidden_states(self.backbone, batch.row)
        return _head_values(self.head, hidden_MD.float())

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with values, returns and GAE advantages, and metrics of the values.

        `explained_variance` is 1 - Var(return - value) / Var(return); it is missing if all returns
        are equal.
        """
        learner = self.parts.learner
        self.num_steps += 1
        values = token_values(learner, samples, partial(self.values, learner), optim=config.optim)
        valued = [
            with_gae(sample, of_sample, lam=self.options.lam)
            for sample, of_sample in zip(samples, values, strict=True)
        ]
        returns_K, values_K = (
            [x for s in valued for x in compress(s.columns[name], s.mask)]
            for name in ("returns", "values")
        )
        return_mean, return_variance = moments(returns_K, learner.world)
        metrics = {"return_mean": return_mean}
        if return_variance > 0.0:
            errors_K = [g - v for g, v in zip(returns_K, values_K, strict=True)]
            metrics["explained_variance"] = (
                1.0 - moments(errors_K, learner.world)[1] / return_variance
            )
        return whitened(valued, learner.world), metrics

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> list[LossTerm]:
        """The terms and the value loss; during the critic's warm-up only the value loss, so the
        policy does not change."""
        value = LossTerm(minibatch, self.loss, VALUE_WEIGHT, "value", trains_policy=False)
        warming_up = self.num_steps <= self.options.warmup_steps
        return [value] if warming_up else [*terms, value]

    def state(self) -> dict[str, Any]:
        """How many updates the critic has had."""
        return {"num_steps": self.num_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from it. A checkpoint of before 2026-11-30 begins the warm-up again."""
        self.num_steps = state.get("num_steps", 0)

    def loss(self, learner: Learner, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped value loss of each token, and a mask of the gradients removed by the clip."""
        losses_M, cut_M = clipped_value_loss(
            self.values(learner, batch),
            batch.columns["values"],
            batch.columns["returns"],
            clip=self.options.clip,
        )
        return losses_M, {"value_loss": losses_M, "value_clip_share": cut_M}


@as_forward
def _head_values(head: nn.Linear, hidden_MD: Tensor) -> Tensor:
    values_M1: Tensor = nn.Linear.forward(head, hidden_MD)
    return values_M1[:, 0]


def gae(rewards_K: Sequence[float], values_K: Sequence[float], *, lam: float) -> list[float]:
    """Generalized advantage estimation over one transcript, arXiv 1506.02438 eq. 16 with gamma 1.

    One time step is one sampled token. With d_k = r_k + V_{k+1} - V_k, the advantage is the sum
    over l of lam^l d_{k+l}. `values_K` are the values of the states before each token. The state
    after the last token has value 0, because the game is over. Tokens of the other seat and of the
    game are not time steps: the next value depends on them, but lam does not decay over them.
    """
    advantages_K = [0.0] * len(values_K)
    advantage, next_value = 0.0, 0.0
    for k in reversed(range(len(values_K))):
        delta = rewards_K[k] + next_value - values_K[k]
        advantage = delta + lam * advantage
        advantages_K[k] = advantage
        next_value = values_K[k]
    return advantages_K


def with_gae(sample: Sample, values: Sequence[float], *, lam: float) -> Sample:
    """The sample with advantages, the critic's values and the critic's targets.

    `values` has one entry per token and is read where the mask is 1. A value's target is the
    lambda-return, advantage + value.
    """
    values_K = [*compress(values, sample.mask)]
    rewards_K = [g - after for g, after in pairwise([*compress(sample.returns, sample.mask), 0.0])]
    advantages_K = gae(rewards_K, values_K, lam=lam)
    returns_K = (a + v for a, v in zip(advantages_K, values_K, strict=True))
    columns = {"values": list(values), "returns": at_trained_tokens(returns_K, sample)}
    advantages = at_trained_tokens(advantages_K, sample)
    return replace(sample, advantages=advantages, columns=sample.columns | columns)


def whitened(samples: Sequence[Sample], world: World) -> list[Sample]:
    """The samples with advantages of mean 0 and variance 1 over the trained tokens of all ranks."""
    mean, variance = moments([a for s in samples for a in compress(s.advantages, s.mask)], world)
    scale = 1.0 / math.sqrt(variance + WHITE_EPS)

    def white(sample: Sample) -> list[float]:
        whitened_K = ((a - mean) * scale for a in compress(sample.advantages, sample.mask))
        return at_trained_tokens(whitened_K, sample)

    return [replace(sample, advantages=white(sample)) for sample in samples]


def moments(values_K: Sequence[float], world: World) -> tuple[float, float]:
    """Mean and variance over all ranks; 0 and 0 without values."""
    total, count = all_reduce_sum([sum(values_K), float(len(values_K))], world)
    mean = total / max(1.0, count)
    squares = all_reduce_sum([sum((value - mean) ** 2 for value in values_K)], world)[0]
    return mean, squares / max(1.0, count)


def clipped_value_loss(
    values_M: Tensor, old_values_M: Tensor, returns_M: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error with the change of the value clipped (as in OpenAI Baselines' PPO;
    arXiv 2005.12729, section 3, item 1).

    Returns max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2) / 2 for each token, and a
    0/1 mask of the tokens whose gradient was removed by the clip. `clip` 0 turns clipping off.
    """
    losses_M = 0.5 * (values_M - returns_M).square()
    if clip == 0.0:
        return losses_M, torch.zeros_like(losses_M)
    near_M = old_values_M + (values_M - old_values_M).clamp(-clip, clip)
    near_losses_M = 0.5 * (near_M - returns_M).square()
    cut_M = (near_losses_M > losses_M) & ((values_M - old_values_M).abs() > clip)
    return torch.maximum(losses_M, near_losses_M), cut_M.float()
