"""What a method adds to a training step: the hooks of `Method`, its loss terms, its own modules.

A step asks its methods in the order of the settings (docs/your_method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.config.player_spec import Spec
from selfplay.config.plugins import NoOptions, methods_of, own_call
from selfplay.distributed import World, raise_on_all_ranks
from selfplay.engines.base import Completion, Request
from selfplay.errors import OwnFault, SettingsError
from selfplay.learner.batch import MicroBatch
from selfplay.rollout.driver import Rollout
from selfplay.rollout.episode import Episode

if TYPE_CHECKING:
    from selfplay.learner.learner import Learner

# A micro-batch's token losses [M] and metrics [M] by name.
Objective = Callable[["Learner", MicroBatch], tuple[Tensor, dict[str, Tensor]]]

# Plays so many further instances of the step over all ranks, each of which must call; gives this
# rank's games.
More = Callable[[int], Rollout]


# Answers chats outside games, in order.
Ask = Callable[[Sequence[Request]], list[Completion]]


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
    the run's exact texts, and `reader`, which gives the answers of a chat model by its spec."""

    config: Config
    learner: Learner
    load: Callable[[], PreTrainedModel]
    rendering: Rendering | None = None
    reader: Callable[[Spec], Ask] | None = None


class Method:
    """A method: six hooks, each of which does nothing here. Every rank calls each at the same point
    of a step, in the order below.

    `Options` is the class of its settings, a dataclass, whose `check(config)` may raise ValueError
    for other settings that do not fit. With `more_instances` of it the method may play as many
    instances more in a step. `trained` are the modules that it trains, by the names that
    checkpoints and metrics give them.
    """

    Options: type = NoOptions
    name = ""  # in the settings

    def __init__(self, options: Any, parts: Parts) -> None:
        self.options, self.parts, self.trained = options, parts, dict[str, Trained]()

    @classmethod
    def ready(cls, options: Any, config: Config, *, ask: bool) -> None:
        """Raise SettingsError for what the method lacks on this machine, before a start writes
        anything. With `ask`, on the first rank, it may also ask a model."""

    def after_play(self, rollout: Rollout, more: More, *, config: Config) -> Rollout:
        """This rank's games that the step uses, those of `more` among them, as the methods before
        this one leave them. What `reward.function` pays comes later (`with_rewards` asks it here).

        Every rank must ask for equally many further instances, together at most `more_instances` of
        the settings; else `more` raises OwnFault.
        """
        return rollout

    def samples(self, samples: list[Sample], episodes: Sequence[Episode]) -> list[Sample]:
        """The samples of this rank's games, with rewards, before they are compared in groups.

        A sample's `group` is the key of those that it is compared with. One that is left out trains
        nowhere, but its group's numbers are counted with it.
        """
        return samples

    def prepare(
        self, samples: Sequence[Sample], *, step: int, config: Config
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """This rank's samples with advantages, with columns or advantages of its own, and metrics
        over all ranks; before any weight changes. `config` is the step's."""
        return samples, {}

    def terms(
        self, terms: Sequence[LossTerm], minibatch: Sequence[Sample], *, step: int
    ) -> Sequence[LossTerm]:
        """The loss terms of an optimizer step: those given, and others or fewer.

        The first is the policy's loss on the samples of `minibatch`, unless a method before this
        one has taken it out. Every rank must give equally many terms, in one order. A term's loss
        is divided by its own number of tokens over all ranks.
        """
        return terms

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside `trained`, as plain values of JSON, equal on every
        rank.

        It is asked before a step, too, and written if the step fails: give copies of what a step
        changes.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from this state; {} in a new run.

        Called once, after `trained` has been filled from the checkpoint and before the first step.
        """


def check_methods(config: Config, *, ask: bool) -> None:
    """Ask each method of the settings whether it is `ready`."""
    for name, kind, options in methods_of(config):
        with own_call("methods", name):
            kind.ready(options, config, ask=ask)


def make_methods(parts: Parts) -> list[Method]:
    """The methods of the settings, in their order, each with its name there.

    Raises SettingsError for two of one class name, or that train modules of one name, and OwnFault
    for one of one's own that cannot be made.
    """
    methods = []
    for name, kind, options in methods_of(parts.config):
        with own_call("methods", name):
            methods.append(kind(options, parts))
        methods[-1].name = name
    names = [type(method).__name__ for method in methods]
    names += [name for method in methods for name in method.trained]
    for name in (name for i, name in enumerate(names) if name in names[:i]):
        raise SettingsError(f"methods must have names of their own, got {name} twice")
    return methods


@contextmanager
def asking(method: Method, world: World) -> Iterator[None]:
    """Around a call of a hook: what goes wrong in a method of one's own is an OwnFault of one line,
    on every rank. A hook that gathers must not fail on one rank alone, or the others wait for it.
    """
    with raise_on_all_ranks(world), own_call("methods", method.name):
        yield
