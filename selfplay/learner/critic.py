"""PPO's critic: the expected return of a seat before each token that it samples.

A value is a linear head on the last hidden state at the position whose next token is sampled. The
hidden state is the policy's, without gradient from the value loss (`critic.kind: head`) or with it
(`shared_head`), or that of a second backbone, which starts from the same weights (`model`). The
head starts at zero, so the first values are 0, and computes in fp32 whatever the dtype of the
layers.

Shapes: M trained tokens of a micro-batch, D width of the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfplay.config import CriticConfig, OptimConfig
from selfplay.distributed import World, run_as_forward, shard_alone
from selfplay.learner.optimizer import make_optimizer


@dataclass(slots=True)
class Critic:
    """The head, the critic's own backbone (None: the head reads the policy's), and their optimizer.

    `module` holds both under the names of the checkpoint. With `shared` the value loss also trains
    the policy's layers.
    """

    module: nn.ModuleDict
    head: nn.Linear
    backbone: PreTrainedModel | None
    shared: bool
    optimizer: torch.optim.Optimizer


def make_critic(
    backbone: PreTrainedModel | None,
    *,
    width: int,
    config: CriticConfig,
    optim: OptimConfig,
    world: World,
) -> Critic:
    """A critic on its own `backbone`, or on the policy's hidden states (None), of this `width`.

    The backbone is already sharded; the head is sharded over the same ranks.
    """
    head = nn.utils.skip_init(nn.Linear, width, 1, device=world.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    shard_alone(head, world)
    module = nn.ModuleDict({"head": head})
    if backbone is not None:
        if not backbone.config.tie_word_embeddings:
            backbone.get_output_embeddings().requires_grad_(False)  # values need no logits
        module["trunk"] = backbone  # the key in checkpoints
    optimizer = make_optimizer(module, optim, lr=config.lr)
    return Critic(module, head, backbone, config.kind == "shared_head", optimizer)


def head_values(head: nn.Linear, hidden_MD: Tensor) -> Tensor:
    """The values [M] of hidden states [M, D], fp32."""
    return run_as_forward(head, _head_values, hidden_MD.float())


def _head_values(head: nn.Linear, hidden_MD: Tensor) -> Tensor:
    values_M1: Tensor = nn.Linear.forward(head, hidden_MD)
    return values_M1[:, 0]
