"""What a method adds to a training step: the hooks of `Method`, its loss terms, its own modules.

A step asks its methods in the order of the settings (docs/your_method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.errors import OwnFault
from selfplay.learner.batch import MicroBatch

if TYPE_CHECKING:
    from selfplay.learner.learner import Learner

# A micro-batch's token losses [M] and metrics [M] by name.
Objective = Callable[["Learner", MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of an optimizer step's loss: samples, their objective, its weight.

    `name` is what a message calls the loss. The term's sum is divided by its number of trained
    tokens, or with `by_sample` by that of its samples. Without `trains_policy` it leaves the policy
    as it is. `faults` are those of code of one's own in the objective, which ends the step after
    its last pass, because the passes involve the other ranks.
    """

    samples: Sequence[Sample]
    objective: Objective
    weight: float = 1.0
    name: str = ""
    by_sample: bool = False
    trains_policy: bool = True
    faults: list[OwnFault] = field(default_factory=list)


@dataclass(slots=True)
class Trained:
    """A module that a method trains beside the policy, and its optimizer. It is offloaded, clipped,
    stepped and saved as the policy is; its parameters are sharded already."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method is made of: the run's settings, the learner with its ranks (`learner.world`),
    `load`, which gives a further model with the policy's first weights, sharded as the policy is,
    and the run's exact texts."""

    config: Config
    learner: Learner
    load: Callable[[], PreTrainedModel]
    rendering: Rendering | None = None


class Method:
    """A method. Each hook does nothing here; every rank calls each at the same point.

    `trained` are the modules that it trains, by the names that checkpoints and metrics give them.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self.trained = parts, dict[str, Trained]()

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """This rank's samples, with columns or advantages of its own, and metrics over all ranks;
        before any weight changes. `config` is the step's."""
        return samples, {}

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> Sequence[LossTerm]:
        """The loss terms of an optimizer step: those given, and others or fewer."""
        return terms
